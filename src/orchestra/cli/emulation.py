"""`orchestra emulation`: check, use and clean up clusters that Linux emulates on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestra.cli.arguments import Parser
from orchestra.cli.bench import print_table, progress_line
from orchestra.cluster import Cluster, load_cluster
from orchestra.errors import InputError, nearest

HELP = """\
usage: orchestra emulation ACTION [ARGUMENT ...]

The engine `emulation` runs the same processes as the engine `processes`, each node of a cluster in
a network namespace of its own with shaped links, and with a part of this machine's cores:

  orchestra train examples/quickstart.yaml --engine emulation --cluster examples/clusters/mixed.yaml

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


def main(arguments: Sequence[str]) -> int:
    """Carry out one action."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    actions = {"check": _check, "run": _run, "clean": _clean, "compose": _compose}
    name, *rest = arguments
    if name not in actions:
        raise InputError(f"unknown action {name!r} of an emulation; {nearest(name, actions)}")
    return actions[name](rest)


def _parser(action: str, description: str, epilog: str = "") -> Parser:
    parser = Parser(f"emulation {action}", description, epilog)
    parser.add_argument("cluster", metavar="CLUSTER", help="a preset or a file")
    return parser


def _load(text: str) -> Cluster:
    return load_cluster(text, where="CLUSTER", folder=Path())


def _check(arguments: Sequence[str]) -> int:
    options = _parser("check", CHECK).read(arguments)
    cluster = _load(options.cluster)
    from orchestra.engines.emulation.check import check_cluster

    with progress_line() as tell:
        rows = check_cluster(cluster, tell)
    lines = [(row.name, *row.texts, f"{row.off:+.1%}" + " (!)" * (not row.holds)) for row in rows]
    print_table(f"cluster {cluster.name}", ("", "described", "measured", "off"), lines)
    return 0 if all(row.holds for row in rows) else 1


def _run(arguments: Sequence[str]) -> int:
    own, command = _split(arguments)
    parser = _parser("run", RUN, RUN_EPILOG)
    parser.option("--ranks", "N", "default: one a node, or as many as the cluster names", type=int)
    options = parser.read(own)
    if not command:
        raise InputError("give a command behind --: orchestra emulation run CLUSTER -- python ...")
    cluster = _load(options.cluster)
    from orchestra.engines.emulation.commands import run_command

    run_command(cluster, _ranks(options.ranks, cluster), command)
    return 0


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and behind."""
    words = list(arguments)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def _ranks(given: int | None, cluster: Cluster) -> int:
    if given is not None:
        if given < 1:
            raise InputError(f"--ranks: {given} is below 1")
        return given
    return len(cluster.nodes if isinstance(cluster.placement, str) else cluster.placement)


def _clean(arguments: Sequence[str]) -> int:
    Parser("emulation clean", CLEAN).read(arguments)
    from orchestra.engines.emulation.nodes import require_emulation
    from orchestra.engines.emulation.quota import sweep

    require_emulation()
    removed = sweep()
    for line in removed:
        print(f"removed {line}")
    if not removed:
        print("nothing was left behind")
    return 0


def _compose(arguments: Sequence[str]) -> int:
    own, command = _split(arguments)
    parser = _parser("compose", COMPOSE, COMPOSE_EPILOG)
    parser.option("--ranks", "N", "default: one a node, or as many as the cluster names", type=int)
    options = parser.read(own)
    cluster = _load(options.cluster)
    ranks = _ranks(options.ranks, cluster)
    from orchestra.engines.emulation.commands import compose_text

    training = ["orchestra", "train", "--task", "digits", "--strategy", "AllReduce"]
    training += ["--ranks", str(ranks), "--out", "/runs/compose"]
    print(compose_text(cluster, ranks, command or training), end="")
    return 0
