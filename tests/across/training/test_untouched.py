"""The untouched cases are whole: both files load and expand, and every script and variant exists."""

from experiments.untouched.cases import NUM_CLEAN, NUM_FAULTS, check, clean_pairs, faults
from experiments.untouched.run import judge_fault


def test_untouched_cases_are_whole():
    check()
    assert (len(faults()), len(clean_pairs())) == (NUM_FAULTS, NUM_CLEAN)


def test_a_setting_is_located_as_a_word():
    fault = next(each for each in faults() if each.settings == ["eps"])
    said = {"verdict": "incomparable", "exit_status": 4}

    def is_located(reason):
        return judge_fault(fault, "float32", said | {"reason": reason})["located"]

    assert is_located("the setting eps differs: 1e-8, 1e-6")
    assert not is_located("the number of steps differs")
