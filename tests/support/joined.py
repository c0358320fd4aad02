"""What a launcher such as torchrun starts: `joined.py PROGRAM FOLDER PATIENCE`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support import rank_programs

from orchestra.engines.processes.environment import detect
from orchestra.engines.processes.rank import join
from orchestra.errors import OrchestraError


def main(name: str, folder: str, patience: str) -> int:
    launched = detect(os.environ)
    assert launched is not None
    try:
        outcome = join(
            getattr(rank_programs, name), Path(folder), launched, patience=float(patience)
        )
    except OrchestraError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return 1
    Path(folder, f"outcome {launched.rank}").write_text(repr(outcome.results))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
