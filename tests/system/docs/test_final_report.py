"""The report is built from data that is there, and its numbers are those of the pages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from studies.questions.declaration import questions
from studies.report.__main__ import SOURCE, build

DOCS = SOURCE.parent
DATA = SOURCE / "data"


def _answer(number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"question-{number:02d}.json").read_text())
    return found


def test_report_is_built_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("typst")
    source = tmp_path / "report"
    shutil.copytree(SOURCE, source)
    assert build(tmp_path / "built", source) == []
    assert (tmp_path / "built" / "report.pdf").read_bytes().startswith(b"%PDF")
    html = (tmp_path / "built" / "report.html").read_text()
    assert all(question.text in html for question in questions())
    made, kept = ({path.name for path in each.glob("figures/*.svg")} for each in (source, SOURCE))
    assert made == kept


def test_each_answer_is_that_of_the_declared_question() -> None:
    for question in questions():
        found = _answer(question.number)
        assert found["question"] == question.text
        assert found["declared"] == question.declared.isoformat()
        assert found["hypotheses"] == [each["says"] for each in question.hypotheses]


def test_each_number_from_a_page_of_results_is_on_that_page() -> None:
    measured = json.loads((DATA / "measured.json").read_text())
    assert measured
    for number in measured.values():
        assert number["quote"] in (DOCS / number["page"]).read_text()
        assert f"{number['value']:.9g}" in number["quote"].replace(",", "")
