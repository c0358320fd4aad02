"""The compiled executor under the compiler's sanitizers, and with bytes that nobody should send."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from tests.support.all_schedules import schedules
from tests.support.played_rows import memory_before, plan, played, random_vectors

from orchestra.schedules import ALL_REDUCE, Schedule
from orchestra.schedules.rows import rows_of
from orchestra.schedules.table import table_of
from orchestra.transports import executor
from orchestra.transports.framing import DTYPES

HERE = Path(__file__).parent
COMPILER = shutil.which("gcc") or shutil.which("clang")
SANITIZERS = ["address,undefined", pytest.param("thread", marks=pytest.mark.lab)]


def case(schedule: Schedule, length: int, dtype: torch.dtype) -> bytes:
    """Return a case of `executor_harness.c`."""
    vectors = random_vectors(schedule.ranks, length, dtype)
    memories = [memory_before(schedule, rank, each) for rank, each in enumerate(vectors)]
    results, width = played(schedule, vectors), dtype.itemsize
    edges = [width * edge for edge in schedule.edges(length)]
    table, code = plan(schedule, 0, memories[0]).table, DTYPES.index(dtype)
    parts = [struct.pack("=QQQII", schedule.ranks, memories[0].nbytes, table, code, 7)]
    for rank, (memory, result) in enumerate(zip(memories, results, strict=True)):
        rows = rows_of(table_of(schedule).parts(rank), edges)
        parts += [struct.pack("=Q", len(rows)), rows.tobytes()]
        parts += [each.view(torch.uint8).numpy().tobytes() for each in (memory, result)]
    return b"".join(parts)


@pytest.mark.lab
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitizers_find_nothing(sanitizer: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    program = tmp_path / "harness"
    source = Path(executor.__file__).with_name("executor.c")
    flags = ["-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    bits = ["-ffp-contract=off", "-fno-trapping-math", "-DVECTORIZED="]
    files = [f'-DEXECUTOR="{source}"', str(HERE / "executor_harness.c"), "-o", str(program)]
    made = subprocess.run([COMPILER, *flags, *bits, *files], capture_output=True, text=True)
    if "cannot find" in made.stderr:
        pytest.skip("the compiler has no such sanitizer")
    assert made.returncode == 0, made.stderr
    cases = [case(schedule, 2003, torch.float32) for schedule in schedules(3)]
    cases += [case(schedule, 53, torch.float16) for schedule in schedules(5)]
    cases += [case(ALL_REDUCE["butterfly"](4), 1001, dtype) for dtype in executor.SUMMED]
    run = subprocess.run([program, "40"], input=b"".join(cases), capture_output=True)
    assert (run.returncode, run.stdout) == (0, b"done\n"), run.stderr.decode()[-3000:]
