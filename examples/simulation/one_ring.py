"""One gradient's way round a ring of three, message by message.

    python examples/simulation/one_ring.py

The gradient of 7,500 parameters, with a few numbers behind it, is cut into three pieces, one a
rank. In two rounds a rank passes on what it has added up so far of a piece, in two more the sums.
A piece and its header are 10,040 bytes: 80.3 us on a link, after 100 us of latency. It prints:

    from us    to us  rank 0
        4.0    328.0  gradient (32 samples)
      328.0    328.0  send 10.0 kB to rank 1
      328.0    428.0  wait for rank 2
      428.0    508.4  receive 10.0 kB from rank 2
      508.4    508.4  send 10.0 kB to rank 1
      508.4    608.4  wait for rank 2
      608.4    688.7  receive 10.0 kB from rank 2
      688.7    688.7  send 10.0 kB to rank 1
      688.7    788.7  wait for rank 2
      788.7    869.0  receive 10.0 kB from rank 2
      869.0    869.0  send 10.0 kB to rank 1
      869.0    969.0  wait for rank 2
      969.0   1049.4  receive 10.0 kB from rank 2
     1049.4   1057.0  update
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
            batch_size=32, trace_steps=1, snapshots=0, engine="simulation",
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
