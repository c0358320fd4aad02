"""The questions of the report: makes their runs, and writes an answer to each as JSON.

    python -m studies.questions --out runs/questions            all, two at a time: some hours
    python -m studies.questions --out runs/questions --only 3   one of them
    python -m studies.questions --smoke                         all, each run of a moment

Each file in studies/questions/declared states a question, its method, and its hypotheses, which
were written before the runs. Answers go to docs/report/data, those of --smoke nowhere.
Ctrl-C stops it, and the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from studies.pool import Pool
from studies.questions.answers import Records, answer
from studies.questions.declaration import Question, questions
from studies.questions.running import carry_out, size

from orchestra.errors import InputError
from orchestra.records.files import write_atomically

DATA = Path(__file__).parents[2] / "docs" / "report" / "data"


def main() -> int:
    known = {question.number: question for question in questions()}
    parser = argparse.ArgumentParser(
        prog="python -m studies.questions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/questions"), help="for the runs")
    parser.add_argument("--only", type=int, nargs="+", choices=known, default=list(known))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each takes one core")
    parser.add_argument("--smoke", action="store_true", help="runs of a moment, in a new folder")
    given = parser.parse_args()
    chosen = [known[number] for number in given.only]
    try:
        if not given.smoke:
            make(chosen, given.out, DATA, given.jobs)
        else:
            with tempfile.TemporaryDirectory() as folder:
                small = [question.small() for question in chosen]
                make(small, Path(folder), Path(folder), given.jobs)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 1
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def make(chosen: list[Question], out: Path, data: Path, jobs: int) -> None:
    """Make the runs of the questions below `out`, and write an answer to each into `data`.

    A question that has no answer yet gets one without rows first.
    """
    data.mkdir(parents=True, exist_ok=True)
    for question in chosen:
        if not _path(data, question).exists():
            _write(data, question, {})
    with Pool(jobs, sum(map(size, chosen))) as pool:
        for question in chosen:
            found = _write(data, question, carry_out(question, out, pool))
            verdicts = [test["verdict"] for test in found["tests"]]
            counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
            print(f"question {question.number}: {counts or question.missing}", flush=True)


def _write(data: Path, question: Question, records: Records) -> dict[str, Any]:
    command = f"python -m studies.questions --only {question.number}"
    found = answer(question, records, command)
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    write_atomically(_path(data, question), text)
    return found


def _path(data: Path, question: Question) -> Path:
    return data / f"question-{question.number:02d}.json"


if __name__ == "__main__":
    sys.exit(main())
