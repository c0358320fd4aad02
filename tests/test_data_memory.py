"""The example that trains on a file which a rank has no room for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
FILE, LIMIT = 112, 80  # megabytes


@pytest.mark.skipif(sys.platform != "linux", reason="the example asks Linux for the memory")
def test_a_file_larger_than_the_limit_of_a_rank(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "data_larger_than_memory.py")]
    command += ["--megabytes", str(FILE), "--limit", str(LIMIT), "--folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=150)
    assert ended.returncode == 0, ended.stderr
    rows = re.findall(r"(\w+)\(.*\): accuracy ([\d.]+), peak of a rank (\d+) MB", ended.stdout)
    assert [name for name, _, _ in rows] == ["Single", "AllReduce", "ParameterServer", "LocalSGD"]
    for _, accuracy, peak in rows:
        assert float(accuracy) > 0.3  # guessing: 0.1
        assert 0 < int(peak) <= LIMIT
    assert re.search(r"file read whole fails: .*MemoryError", ended.stdout)
    assert not list(tmp_path.iterdir())  # the file is gone
