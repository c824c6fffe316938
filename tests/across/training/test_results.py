"""Files of results keep the first answer to each case, and rows of other names."""

import json

from experiments.results import Results


def answers(rows):
    return "\n".join(f"{row['case']}: {row['first']['answer']}, {row['answer']}" for row in rows)


def test_first_answers_stay_beside_later_ones(tmp_path):
    path = tmp_path / "folder" / "set.json"
    for row in ({"case": "b", "answer": "bug"}, {"case": "a", "answer": "equal"}, {"case": "b", "answer": "equal"}):
        Results(path, "case", answers).add(row)
    assert path.with_suffix(".md").read_text() == "a: equal, equal\nb: bug, equal"
    assert [row["first"]["answer"] for row in json.loads(path.read_text())] == ["equal", "bug"]


def test_each_case_of_a_row_keeps_its_first_answer(tmp_path):
    def add(*cases):
        row = Results(tmp_path / "set.json", "script", lambda _: "").add({"script": "one", "cases": list(cases)})
        return [(case["case"], case["first"]["answer"], case["answer"]) for case in row["cases"]]

    assert add({"case": "x", "answer": "failed"}) == [("x", "failed", "failed")]
    both = add({"case": "new", "answer": "bug"}, {"case": "x", "answer": "equal"})
    assert both == [("new", "bug", "bug"), ("x", "failed", "equal")]


def test_rows_are_in_the_stated_order_without_removed_cases(tmp_path):
    path = tmp_path / "set.json"
    for name in ("removed", "last"):
        Results(path, "case", answers).add({"case": name, "answer": "equal"})
    results = Results(path, "case", answers, ["first", "last"])
    results.add({"case": "first", "answer": "equal"})
    assert [row["case"] for row in json.loads(path.read_text())] == ["first", "last"]
    assert [row["case"] for row in results.of(["last", "nobody"])] == ["last"]
