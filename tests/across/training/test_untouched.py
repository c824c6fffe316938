"""The untouched cases are whole: both files load and expand, and every script and variant exists."""

from experiments.untouched.cases import NUM_CLEAN, NUM_FAULTS, check, clean_pairs, faults


def test_untouched_cases_are_whole():
    check()
    assert (len(faults()), len(clean_pairs())) == (NUM_FAULTS, NUM_CLEAN)
