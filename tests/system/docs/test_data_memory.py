"""The example that trains on a file which a rank has no room for."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.support.commands import Started
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
FILE, LIMIT = 112, 80  # megabytes


@pytest.mark.lab
@pytest.mark.skipif(sys.platform != "linux", reason="the example asks Linux for the memory")
def test_a_file_larger_than_the_limit_of_a_rank(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "data_larger_than_memory.py")]
    command += ["--megabytes", str(FILE), "--limit", str(LIMIT), "--folder", str(tmp_path)]
    with Started(command, tmp_path) as process:
        ended = process.end()
    assert ended.status == 0, ended.err
    rows = re.findall(r"(\w+)\(.*\): accuracy ([\d.]+), peak of a rank (\d+) MB", ended.out)
    assert [name for name, _, _ in rows] == ["Single", "AllReduce", "ParameterServer", "LocalSGD"]
    for _, accuracy, peak in rows:
        assert float(accuracy) > 0.3  # guessing: 0.1
        assert 0 < int(peak) <= LIMIT
    assert re.search(r"file read whole fails: .*MemoryError", ended.out)
    assert not list(tmp_path.iterdir())  # the file is gone
