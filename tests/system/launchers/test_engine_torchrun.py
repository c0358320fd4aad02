"""The example for torchrun, on two nodes that share nothing but a folder and a cable."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Started
from tests.support.emulated import needs_emulation
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

from orchestra.cluster import load_cluster
from orchestra.engines.emulation.nodes import EmulatedCluster

pytestmark = needs_emulation
EXAMPLES = ROOT / "examples/engines"


@contextmanager
def two_nodes(folder: Path) -> Iterator[list[Started]]:
    """The example on both nodes, each in a network namespace, as on two machines."""
    cluster = load_cluster("two_nodes.yaml", where="test", folder=EXAMPLES)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with ExitStack() as stack:
        emulated = stack.enter_context(EmulatedCluster(cluster, 2))
        places = emulated.places()
        nodes = []
        for number, place in enumerate(places):
            variables: dict[str, str | None] = {
                "MASTER_ADDR": places[0].address,
                "LOCAL_ADDR": place.address,
                "GLOO_SOCKET_IFNAME": place.interface,
                "TP_SOCKET_IFNAME": place.interface,
                "PATH": path,
            }
            command = [str(EXAMPLES / "torchrun.sh"), str(number)]
            command += [str(EXAMPLES / "digits.yaml"), "record"]
            with emulated.network.namespaces[place.node].inside():
                node = Started(command, folder, variables, fresh=True)
            nodes.append(stack.enter_context(node))
        yield nodes


def record(folder: Path) -> dict[str, Any]:
    (found,) = json.loads((folder / "record/summary.json").read_text())["runs"]
    assert isinstance(found, dict)
    return found


def test_two_nodes_train_without_loopback(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as nodes:
        assert [node.end().status for node in nodes] == [0, 0]
    assert record(tmp_path)["status"] == "completed"
    assert record(tmp_path)["ranks"] == 2


@pytest.mark.lab
def test_a_node_goes_on_alone_after_the_other_one_is_lost(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (first, second):
        first.wait_until(
            lambda: any(tmp_path.glob("record/checkpoints/*/manifest.json")), "a checkpoint"
        )
        for pid in second.alive():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not second.alive(), "the second node is gone")
        ended = first.end()
    assert ended.status == 0, ended.err
    assert "rank 1" in ended.err  # the first cause, by name
    assert "resumed from checkpoint" in ended.err
    assert record(tmp_path)["status"] == "completed"
    assert record(tmp_path)["ranks"] == 1
