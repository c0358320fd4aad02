"""`python -m orchestra`."""

from __future__ import annotations

import sys

from orchestra.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
