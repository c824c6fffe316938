"""The cases of devices are whole: names are unique, and every mistake has one place in its script."""

from experiments.devices.run import cases


def test_cases_of_devices_are_whole(tmp_path):
    found = cases()
    assert len({case.called for case, _, _ in found}) == len(found) == 47
    for i, (case, _, b) in enumerate(found):
        text = b.written(tmp_path / str(i)).read_text()
        assert (case.new in text and case.places) or not case.old
        compile(text, b.script, "exec")
