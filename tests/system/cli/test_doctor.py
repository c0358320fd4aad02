"""`orchestra doctor`: what it warns of, on this machine and on hosts with an sshd each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import run
from tests.support.hosts import LINK, SshHosts, needs_sshd, ssh_hosts
from tests.support.waiting import wait_until

from orchestra.cli.doctor import _credible, _missing_cores
from orchestra.cluster import load_cluster
from orchestra.engines.hosts.doctor import warnings_of
from orchestra.engines.hosts.facts import COMPILED, facts_here

WELL = replace(
    facts_here(), torch="2.13.0", cores=8, quota=None, memory=1 << 34, available_memory=1 << 33,
    shm=1 << 33, open_files=4096, interfaces=[("eth0", "10.0.0.1")], compiler="/usr/bin/cc",
    compiled=dict.fromkeys(COMPILED, True), gpu_driver=False, devices=[],
)  # fmt: skip


def test_a_machine_that_has_all_is_warned_of_nothing() -> None:
    assert [*warnings_of(WELL)] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": None}, "pip install torch"),
        ({"compiled": {**WELL.compiled, COMPILED[1]: False}}, "_executor are missing"),
        ({"quota": 1.5}, "1.5 of 8 cores"),
        ({"shm": 64 << 20}, "/dev/shm has 64 MiB"),
        ({"open_files": 256}, "ulimit -n"),
        ({"available_memory": 100 << 20}, "100 MiB of memory"),
        ({"interfaces": []}, "no address but loopback"),
        ({"gpu_driver": True}, "torch sees no GPU"),
    ],
)
def test_each_shortcoming_has_a_line_with_a_remedy(changes: dict[str, Any], words: str) -> None:
    (line,) = warnings_of(replace(WELL, **changes))
    assert words in line
    assert ":" in line


def test_this_machine_as_json(tmp_path: Path) -> None:
    ended = run(["doctor", "--json"], tmp_path)
    assert ended.status == 0, ended.err
    (facts,) = json.loads(ended.out)["hosts"].values()
    assert facts["torch"] == facts_here().torch
    assert facts["cores"] >= 1
    assert facts["devices"] is not None


@pytest.mark.parametrize(
    "arguments", [["--out", "x.yaml"], ["--hosts", "a", "--out", "x.txt"], ["--hosts", ""]]
)
def test_bad_input_is_refused(arguments: list[str], tmp_path: Path) -> None:
    ended = run(["doctor", *arguments], tmp_path)
    assert ended.status == 2
    assert len(ended.err.splitlines()) == 1


def test_a_pair_with_a_short_round_trip_is_not_warned_of() -> None:
    late = ["a to b is slower than their links: a message takes 220 us, not 60 us",
            "a to c is slower than their links: a message takes 400 us, not 60 us",
            "a to b is slower than their links: 40 Mbit/s, not 1 Gbit/s"]  # fmt: skip
    seconds = {("a", "b"): 120e-6, ("b", "a"): 100e-6, ("a", "c"): 500e-6}
    assert _credible(late, {name: name for name in "abc"}, seconds) == late[1:]


def test_a_host_that_was_busy_is_told() -> None:
    facts = {name: replace(facts_here(), cores=4) for name in "ab"}
    (line,) = _missing_cores({"a": 4, "b": 1}, facts)
    assert line.startswith("b: a process got 1 of its 4 cores while it was measured")


def test_the_command_that_trains_on_the_hosts_is_told(tmp_path: Path) -> None:
    ended = run(["doctor", "--hosts", "localhost"], tmp_path)
    assert ended.status == 0, ended.err
    last = ended.out.splitlines()[-1]
    assert last == "to train on these hosts: orchestra train FILE --hosts localhost"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), 2) as made:
        yield made


@pytest.mark.lab
@needs_sshd
def test_links_of_hosts_are_measured_and_written_as_a_cluster(
    hosts: SshHosts, tmp_path: Path
) -> None:
    given = ["doctor", "--hosts", "a,b", "--json", "--out", "found.yaml"]
    with hosts.started(given, tmp_path) as command:
        ended = command.end()
    assert ended.status == 0, ended.err
    wait_until(hosts.nothing_is_left, "nothing is left on any host")
    found = json.loads(ended.out)
    assert [*found["hosts"]] == ["a", "b"]
    links = {(each["from"], each["to"]): each for each in found["links"]}
    assert links.keys() == {("a", "b"), ("b", "a")}
    # Links are shaped, so no measurement can exceed them by more than a burst does.
    assert all(0 < each["bandwidth"] < 1.5 * LINK.bandwidth for each in links.values())
    assert all(0 < each["round_trip"] < 1 for each in links.values())
    cluster = load_cluster("found.yaml", where="test", folder=tmp_path)
    assert [node.name for node in cluster.nodes] == ["a", "b"]
    assert all(node.up is not None for node in cluster.nodes)


@needs_sshd
def test_what_is_in_the_way_of_a_run_is_told_for_each_host(hosts: SshHosts, tmp_path: Path) -> None:
    program = tmp_path / "other.py"
    program.write_text(
        "import runpy, time\nreal = time.time\ntime.time = lambda: real() + 60\n"
        "runpy.run_module('orchestra.engines.hosts.agent', run_name='__main__')\n"
    )
    python = hosts.interpreter("b", f"exec {sys.executable} -P {program}")
    given = ["doctor", "--hosts", "a,b,10.0.0.99", "--json", "--remote-python", python]
    with hosts.started(given, tmp_path) as command:
        ended = command.end()
    assert ended.status == 1
    found = json.loads(ended.out)
    assert [*found["hosts"]] == ["a", "b"]
    unreachable, late = found["refused"]
    assert unreachable.startswith("10.0.0.99: ssh does not get there")
    assert late.startswith("b: its clock is 60.0 s ahead")
    assert [each["bandwidth"] for each in found["links"]] == [None, None]
