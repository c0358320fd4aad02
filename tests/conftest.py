"""All tests compute with one intra-op thread a rank: bits are equal where thread counts are."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
