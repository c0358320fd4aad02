"""The bytes of gradients that a rank sends."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import patch

from tests.support.noted import Noted
from tests.support.threads import run_ranks
from tests.support.training import settings

from orchestra.strategies.base import Strategy
from orchestra.trainer.session import Session
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime


def gradient_bytes(
    strategy: Strategy, ranks: int, folder: Path, local_ranks: Sequence[int] = ()
) -> Counter[tuple[int, int]]:
    """The bytes of gradient from each rank to each, for one step; those to itself left out."""
    run = settings(strategy, ranks, "images(samples=8)", batch_size=8 // ranks)
    folder.mkdir(exist_ok=True)

    def program(runtime: Runtime) -> list[tuple[int, int, int, int]]:
        noted = Noted(runtime.transport)
        place = local_ranks[runtime.rank] if local_ranks else 0
        session = Session(
            replace(runtime, transport=cast(Transport, noted), local_rank=place),
            run,
            strategy,
            folder,
        )
        session.begin()
        session.train()
        session.finish()
        return noted.sent

    sent: Counter[tuple[int, int]] = Counter()
    with patch.dict(os.environ, {"ORCHESTRA_COMPILED": "0"}):  # messages can be looked at
        found = run_ranks(ranks, program)
    for by_rank in found:
        for source, target, tag, size in by_rank:
            if tag == Tag.GRADIENTS and source != target:
                sent[source, target] += size
    return sent
