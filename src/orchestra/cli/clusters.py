"""`orchestra import` and `orchestra emulation`: clusters of instances, and on Linux."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from orchestra.cli.terminal import Parser, choose, print_table, progress_line
from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.file import cluster_text
from orchestra.cluster.machines import cluster_of, instances
from orchestra.errors import InputError
from orchestra.records.record import write_atomically

IMPORT = """\
Write the file of a cluster of cloud instances, with their network and price. A SOURCE is an
instance of the table below. It takes a number and further figures, SOURCE,N,KEY=VALUE,...: speed
(of a core, where the machine that was calibrated has 1) or flops (what a core or a GPU sustains),
bandwidth and latency (of the network), gpu_link and gpu_latency (between GPUs), memory, price,
watts, jitter, name. A figure that matters and that the table lacks has to be given. Several sources
are at one switch.
"""

IMPORT_EPILOG = """\
example:
  orchestra import 'aws:g5.xlarge,4,flops=15 TFLOP/s,latency=25 us' -o g5.yaml
      four instances; then: orchestra simulate experiment.yaml --cluster g5.yaml --ranks 4
"""


def import_cluster(arguments: Sequence[str]) -> int:
    parser = Parser("import", IMPORT, f"{IMPORT_EPILOG}\n{_table()}")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="instances")
    out_help = "a .yaml (default: print it)"
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help=out_help)
    options = parser.read(arguments)
    out: Path | None = options.out
    if out is not None and out.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out {out}: is neither .yaml nor .yml")
    sources: list[str] = options.sources
    text = cluster_text(cluster_of(sources, "imported" if out is None else out.stem))
    if out is None:
        print(text, end="")
    else:
        write_atomically(out, f"# from {' '.join(sources)}\n{text}")
        print(out)
    return 0


def _table() -> str:
    rows = [f"{'instance':20}{'vCPUs':>6}{'GPUs':>9}{'Gbit/s':>8}{'USD/h':>12}"]
    for name, row in instances().items():
        gpus = f"{row['gpus']} {row['gpu']}" if row["gpu"] else ""
        network, price = f"{int(row['network']) / 1000:g}", row["usd_per_hour"] or "-"
        rows.append(f"{name:20}{row['vcpus']:>6}{gpus:>9}{network:>8}{price:>12}")
    dates = ", ".join(sorted({row["date"] for row in instances().values()}))
    rows.append(f"Linux, on demand, in us-east-1 on {dates}; ask your provider for yours.")
    return "\n".join(rows)


EMULATION = """\
usage: orchestra emulation ACTION [ARGUMENT ...]

The engine `emulation` runs the same processes as the engine `processes`, each node of a cluster in
a network namespace of its own with shaped links, and with a part of this machine's cores:

  orchestra train --task digits --strategy AllReduce --engine emulation \\
      --cluster examples/clusters/mixed.yaml

It needs Linux, root, ip and tc. What it cannot emulate on this machine it says in one line.

actions:
  check    measure what the links, latencies and cores of a cluster's nodes really give
  run      start any command once for each rank inside its node, as torchrun would
  compose  write a compose file, and leave the nodes to Docker
  clean    remove what a run left behind that was killed together with its guard

  orchestra emulation ACTION --help says more about each.
"""

CHECK = """\
Measure what the emulation of a cluster gives, beside what its file says: the bandwidth of each link
in both directions, one after the other; the latency from the first node to each other one, as a
message of a rank meets it; and what each node's cores compute while those of all others do, too.

Bandwidths are those of the wire: of each frame of 1,514 bytes a message has 1,448. Latencies are
what messages take more than they would without any.

Exit status: 0 all within 10 %, 1 something is not, 2 bad input.
"""

RUN = """\
Start a command once for each rank, inside its node, with the environment variables of torchrun:
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; OMP_NUM_THREADS, where it
is not set, is the rank's share of its node's cores; GLOO_SOCKET_IFNAME names the shaped interface.
Each line of output begins with the rank and its node. When one command fails, all others are ended.

What the command sends by itself, such as the collectives of torch.distributed, has the bandwidths
of the cluster, and its latencies only where the kernel has netem (docs/emulation.md).

Exit status: 0 all ended well, 1 one did not, 2 bad input.
"""

RUN_EPILOG = """\
examples:
  orchestra emulation run examples/clusters/mixed.yaml -- python ddp.py --epochs 3
      any script for torchrun, on four unlike nodes

  orchestra emulation run 'lan_1gbit(nodes=2, cores=1)' -- python -m torch.distributed.run --help
"""

COMPOSE = """\
Print a compose file for Docker: a service for each node with a rank, with its part of the
processor, on one network; each shapes its link by tc, in both directions, and adds the latencies
where the host's kernel has netem. Its command, with the variables of torchrun, is what stands
behind --, else a short training. The image is that of the repository's Dockerfile.

One rank a node, all nodes at one switch, no faults; otherwise: orchestra emulation run.
"""

COMPOSE_EPILOG = """\
examples:
  orchestra emulation compose examples/clusters/mixed.yaml > compose.yaml
  docker compose up --build --abort-on-container-failure

  orchestra emulation compose CLUSTER -- python ddp.py > compose.yaml
"""

CLEAN = """\
Remove control groups of runs whose processes are all gone, and end what still runs in them. Runs
under way are left alone. Namespaces, interfaces and bridges end by themselves, with the processes
that use them. The next emulated run cleans up, too.
"""


def emulation(arguments: Sequence[str]) -> int:
    actions = {"check": _check, "run": _run, "clean": _clean, "compose": _compose}
    return choose(arguments, actions, EMULATION, "unknown action {!r} of an emulation")


def _check(arguments: Sequence[str]) -> int:
    parser = Parser("emulation check", CHECK)
    parser.add_argument("cluster", metavar="CLUSTER", help="a preset or a file")
    cluster = _load(parser.read(arguments))
    from orchestra.engines.emulation.check import check_cluster

    with progress_line() as tell:
        rows = check_cluster(cluster, tell)
    lines = [(row.name, *row.texts, f"{row.off:+.1%}" + " (!)" * (not row.holds)) for row in rows]
    print_table(f"cluster {cluster.name}", ("", "described", "measured", "off"), lines)
    return 0 if all(row.holds for row in rows) else 1


def _run(arguments: Sequence[str]) -> int:
    options, command = _read_command("run", RUN, RUN_EPILOG, arguments)
    if not command:
        raise InputError("give a command behind --: orchestra emulation run CLUSTER -- python ...")
    cluster = _load(options)
    from orchestra.engines.emulation.commands import run_command

    run_command(cluster, _ranks(options.ranks, cluster), command)
    return 0


def _compose(arguments: Sequence[str]) -> int:
    options, command = _read_command("compose", COMPOSE, COMPOSE_EPILOG, arguments)
    cluster = _load(options)
    ranks = _ranks(options.ranks, cluster)
    from orchestra.engines.emulation.commands import compose_text

    training = ["orchestra", "train", "--task", "digits", "--strategy", "AllReduce"]
    training += ["--ranks", str(ranks), "--out", "/runs/compose"]
    print(compose_text(cluster, ranks, command or training), end="")
    return 0


def _clean(arguments: Sequence[str]) -> int:
    Parser("emulation clean", CLEAN).read(arguments)
    from orchestra.engines.emulation.nodes import require_emulation, sweep

    # As root and on Linux only: without either there is nothing that could have been left.
    require_emulation()
    for line in (removed := sweep()):
        print(f"removed {line}")
    if not removed:
        print("nothing was left behind")
    return 0


def _read_command(
    action: str, description: str, epilog: str, arguments: Sequence[str]
) -> tuple[Namespace, list[str]]:
    """Return the options of an action that takes a command, and what stands behind `--`."""
    parser = Parser(f"emulation {action}", description, epilog)
    parser.add_argument("cluster", metavar="CLUSTER", help="a preset or a file")
    parser.option("--ranks", "N", "default: one a node, or as many as the cluster names", type=int)
    # A further "--", so that one is there: argparse would take the command's options for ours.
    words = [*arguments, "--"]
    place = words.index("--")
    return parser.read(words[:place]), words[place + 1 : -1]


def _load(options: Namespace) -> Cluster:
    return load_cluster(options.cluster, where="CLUSTER", folder=Path())


def _ranks(given: int | None, cluster: Cluster) -> int:
    if given is None:
        return len(cluster.nodes if isinstance(cluster.placement, str) else cluster.placement)
    if given < 1:
        raise InputError(f"--ranks: {given} is below 1")
    return given
