"""One gradient's way round a ring of three, message by message.

    python examples/simulation/one_ring.py

The gradient of 7,500 parameters, with a few numbers behind it, is cut into three pieces, one a
rank. In two rounds a rank passes on what it has added up so far of a piece, in two more the sums.
A piece and its header are 10,040 bytes: 80.3 us on a link, and 1.029 times as long since pieces go
both ways, after 100 us of latency. It prints:

    from us    to us  rank 0
      104.3    428.3  gradient (32 samples)
      428.3    428.3  send 10 kB to rank 1
      428.3    528.3  wait for rank 2
      528.3    610.9  receive 10 kB from rank 2
      610.9    610.9  send 10 kB to rank 1
      610.9    710.9  wait for rank 2
      710.9    793.6  receive 10 kB from rank 2
      793.6    793.6  send 10 kB to rank 1
      793.6    893.6  wait for rank 2
      893.6    976.2  receive 10 kB from rank 2
      976.3    976.3  send 10 kB to rank 1
      976.3   1076.3  wait for rank 2
     1076.3   1159.0  receive 10 kB from rank 2
     1159.0   1166.6  update
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import orchestra

HERE = Path(__file__).parent


def main() -> None:
    """A line for each thing that rank 0 does in a step, in its order."""
    with tempfile.TemporaryDirectory() as out:
        folder = Path(out) / "run"
        orchestra.train(
            "synthetic(7_500, tensors=1, sample_flops=1e6)", 'AllReduce("ring")', ranks=3, steps=1,
            batch_size=32, trace_steps=1, snapshots=0, threads=1, engine="simulation",
            cluster=str(HERE / "lan.yaml"), calibration="none", out=folder, quiet=True,
        )  # fmt: skip
        trace = json.loads(gzip.decompress(next(folder.rglob("trace.json.gz")).read_bytes()))
    events = [event for event in trace["traceEvents"] if event["pid"] == 0 and event["ph"] == "X"]
    done = [event for event in events if event["cat"] != "step"]
    print("from us    to us  rank 0")
    for event in sorted(done, key=_place):
        if event["cat"] == "send" or event["dur"] > 0.05:
            end = event["ts"] + event["dur"]
            print(f"{event['ts']:7.1f}  {end:7.1f}  {event['name']}")


def _place(event: dict[str, Any]) -> tuple[float, bool]:
    """In time; what is sent leaves before anything is waited for."""
    return event["ts"], event["cat"] != "send"


if __name__ == "__main__":
    main()
