"""`orchestra import`: the file of a cluster from descriptions of machines that users have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestra.cli.arguments import Parser
from orchestra.cluster import Cluster
from orchestra.cluster.file import cluster_text
from orchestra.cluster.machines import cluster_of, instances
from orchestra.cluster.simgrid import read_platform
from orchestra.errors import InputError
from orchestra.records.record import write_atomically

DESCRIPTION = """\
Write the file of a cluster from descriptions of machines. A SOURCE is

  platform.xml        a SimGrid platform (version 4) whose hosts and links form a tree; the
                      whole cluster
  here                this machine, as lscpu and, where there are GPUs, nvidia-smi topo -m tell
  node.json           a machine whose `lscpu -J` was saved; its `nvidia-smi topo -m` as topo=FILE
  aws:g5.xlarge       an instance of the table below, with its network and price

Machines take a number and further figures, SOURCE,N,KEY=VALUE,...: speed (of a core, where the
machine that was calibrated has 1) or flops (what a core or a GPU sustains), bandwidth and latency
(of the network), gpu_link and gpu_latency (between GPUs), memory, price, watts, jitter, name. What
matters and nobody knows has to be given. Several sources are at one switch. Whatever does not fit
is refused, with its line.
"""

EPILOG = """\
examples:
  orchestra import platform.xml -o cluster.yaml

  orchestra import 'aws:g5.xlarge,4,flops=15 TFLOP/s,latency=25 us' -o g5.yaml
      four instances; then: orchestra simulate experiment.yaml --cluster g5.yaml --ranks 4

  LAN='bandwidth=1 Gbit/s,latency=50 us'
  orchestra import "here,$LAN" "old.json,2,speed=0.4,$LAN"
      this machine and two older ones, on which `lscpu -J > old.json` was called

  orchestra import 'node.json,2,topo=topo.txt,flops=163 TFLOP/s,bandwidth=1.6 Tbit/s,latency=3 us'
      two machines with GPUs
"""


def main(arguments: Sequence[str]) -> int:
    """Write the file, or print it."""
    parser = Parser("import", DESCRIPTION, f"{EPILOG}\n{_table()}")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="machines, or a platform")
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, help="a .yaml (default: print it)"
    )
    options = parser.read(arguments)
    out: Path | None = options.out
    if out is not None and out.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out {out}: is neither .yaml nor .yml")
    text = cluster_text(_cluster(options.sources, "imported" if out is None else out.stem))
    if out is None:
        print(text, end="")
    else:
        write_atomically(out, f"# from {' '.join(options.sources)}\n{text}")
        print(out)
    return 0


def _cluster(sources: Sequence[str], name: str) -> Cluster:
    platforms = [source for source in sources if source.endswith(".xml")]
    if not platforms:
        return cluster_of(sources, name)
    if len(sources) > 1:
        raise InputError(f"{platforms[0]}: is a whole cluster; import it alone")
    return read_platform(Path(platforms[0]))


def _table() -> str:
    rows = [f"{'instance':20}{'vCPUs':>6}{'GPUs':>9}{'Gbit/s':>8}{'USD/h':>12}"]
    for name, row in instances().items():
        gpus = f"{row['gpus']} {row['gpu']}" if row["gpu"] else ""
        network = f"{int(row['network']) / 1000:g}"
        rows.append(
            f"{name:20}{row['vcpus']:>6}{gpus:>9}{network:>8}{row['usd_per_hour'] or '-':>12}"
        )
    dates = sorted({row["date"] for row in instances().values()})
    rows.append(
        f"Linux, on demand, in us-east-1 on {', '.join(dates)}; ask your provider for yours."
    )
    return "\n".join(rows)
