"""A ring beside parameter servers on Gigabit Ethernet: who has to carry how many bytes.

    python examples/simulation/ring_or_server.py

The gradient of 6.25 million parameters is n = 25 MB, which crosses a link in 0.2 s; to compute it
takes 0.32 s. A message of b bytes takes 100 us + b / (125 MB/s). So a step of N = 8 ranks takes

ring             2 (N - 1) rounds of n / N               2 * 7 * (100 us + 25 ms)  =  0.3514 s
one server       N - 1 gradients in, parameters out      2 * (100 us + 7 * 0.2 s)  =  2.8002 s
server a worker  each has n / N, and sends it to others  2 * (100 us + 7 * 25 ms)  =  0.3502 s

and the gradient, and some milliseconds for the update; a server also adds up what comes, and
copies. Each worker has as large a batch, so that its seven workers take 80 steps for the samples of
70 steps of eight. It prints:

                     steps   seconds    a step   GB sent
    ring                70   47.9196    0.6846   24.5003
    one server          80  252.2130    3.1527   28.1752
    server a worker     70   49.6837    0.7098   24.6761
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import orchestra

HERE = Path(__file__).parent
TASK = "synthetic(6_250_000, tensors=1, sample_flops=1e9)"  # no data and no values: time alone
STRATEGIES = {
    "ring": 'AllReduce("ring")',
    "one server": "ParameterServer()",
    "server a worker": 'ParameterServer(servers=8, placement="beside")',
}


def main() -> None:
    """A line for each strategy."""
    print("                 steps   seconds    a step   GB sent")
    for label, strategy in STRATEGIES.items():
        with tempfile.TemporaryDirectory() as out:
            record = orchestra.train(
                TASK, strategy, ranks=8, steps=70, batch_size=32, equal="worker_batch",
                threads=1, engine="simulation", tensors="shapes", cluster=str(HERE / "lan.yaml"),
                calibration="none", out=Path(out) / "run", quiet=True,
            )  # fmt: skip
        assert record.time.training is not None
        step = record.time.training / record.learned.steps
        gigabytes = record.traffic.sent / 1e9
        print(f"{label:15}  {record.learned.steps:5}  {record.time.training:8.4f}  {step:8.4f}"
              f"  {gigabytes:8.4f}")  # fmt: skip


if __name__ == "__main__":
    main()
