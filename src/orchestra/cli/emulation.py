"""`orchestra emulation`: clusters that Linux emulates on this machine."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from orchestra.cli.terminal import print_table, progress_line
from orchestra.cluster import Cluster, load_cluster
from orchestra.errors import InputError


def check(options: Namespace) -> int:
    cluster = _load(options)
    from orchestra.engines.emulation.check import check_cluster

    with progress_line() as tell:
        rows = check_cluster(cluster, tell)
    lines = [(row.name, *row.texts, f"{row.off:+.1%}" + " (!)" * (not row.holds)) for row in rows]
    print_table(f"cluster {cluster.name}", ("", "described", "measured", "off"), lines)
    return 0 if all(row.holds for row in rows) else 1


def run(options: Namespace) -> int:
    if not options.command:
        raise InputError("give a command behind --: orchestra emulation run CLUSTER -- python ...")
    cluster = _load(options)
    from orchestra.engines.emulation.commands import run_command

    run_command(cluster, _ranks(options.ranks, cluster), options.command)
    return 0


def compose(options: Namespace) -> int:
    cluster = _load(options)
    ranks = _ranks(options.ranks, cluster)
    from orchestra.engines.emulation.commands import compose_text

    training = ["orchestra", "train", "--task", "digits", "--strategy", "AllReduce"]
    training += ["--ranks", str(ranks), "--out", "/runs/compose"]
    print(compose_text(cluster, ranks, options.command or training), end="")
    return 0


def clean(options: Namespace) -> int:
    from orchestra.engines.emulation.groups import sweep
    from orchestra.engines.emulation.nodes import require_emulation

    # As root and on Linux only: without either there is nothing that could have been left.
    require_emulation()
    for line in (removed := sweep()):
        print(f"removed {line}")
    if not removed:
        print("nothing was left behind")
    return 0


def _load(options: Namespace) -> Cluster:
    return load_cluster(options.cluster, where="CLUSTER", folder=Path())


def _ranks(given: int | None, cluster: Cluster) -> int:
    if given is None:
        return len(cluster.nodes if isinstance(cluster.placement, str) else cluster.placement)
    if given < 1:
        raise InputError(f"--ranks: {given} is below 1")
    return given
