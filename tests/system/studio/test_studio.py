"""The studio by HTTP: its times are the simulation's, and it answers this machine only."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from flask.testing import FlaskClient
from tests.support.simulated import simulated_here

from orchestra.cli.main import main
from orchestra.studio import server
from orchestra.studio.menu import ENTRIES, MENU, MenuEntry, Situation
from orchestra.studio.pool import StudioPool
from orchestra.studio.server import SimulationJob, Simulator, make_app
from orchestra.studio.simulate import run_of

LOCKSTEP = ("ring", "halving", "tree", "sharded", "server", "servers", "local", "gossip")


@pytest.fixture(scope="module")
def client() -> Iterator[FlaskClient]:
    with ThreadPoolExecutor(1) as pool:
        client = make_app(Simulator(pool, 1)).test_client()
        client.environ_base["HTTP_HOST"] = "127.0.0.1:8000"
        yield client


def test_a_path_that_is_too_long_for_a_file_is_not_found(client: FlaskClient) -> None:
    assert client.get(f"/{'x' * 5000}.js").status_code == 404


def _nothing() -> None:
    """Prepare a process with no imports."""


def _killed(job: SimulationJob) -> dict[str, Any]:
    """In place of a simulation: a ring's process is killed in it."""
    if job.entry.key == "ring":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"process": os.getpid()}


def test_a_process_that_was_killed_is_told_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "carry_out", _killed)
    with StudioPool(1, _nothing) as pool:
        client = make_app(Simulator(pool, 1)).test_client()
        client.environ_base["HTTP_HOST"] = "127.0.0.1:8000"
        response = client.get("/api/course?strategies=ring")
        assert response.status_code == 503
        assert "was killed, and another one has taken its place" in response.text
        lines = client.get("/api/steps?strategies=ring").text.splitlines()
        assert "has taken its place" in json.loads(lines[-1])["error"]
        assert client.get("/api/course?strategies=tree").status_code == 200


def test_a_process_that_is_killed_while_it_waits_is_replaced_without_a_word() -> None:
    with StudioPool(1, _nothing) as pool:
        first = pool.submit(os.getpid).result()
        os.kill(first, signal.SIGKILL)
        # Not reaped: the pool itself is to notice
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert pool.submit(os.getpid).result() != first


def test_a_pool_ends_at_once_with_what_its_processes_do() -> None:
    pool = StudioPool(2, _nothing)
    calls = [pool.submit(signal.pause) for _ in range(4)]
    pool.shutdown()
    for future in calls:
        assert str(future.exception()) == "the studio has ended"


def test_an_error_in_a_process_is_that_of_the_call() -> None:
    with StudioPool(1, _nothing) as pool:
        with pytest.raises(ValueError, match="invalid literal"):
            pool.submit(int, "x").result()
        assert pool.submit(int, "3").result() == 3


def _step(client: FlaskClient, query: str) -> dict[str, Any]:
    """The first answer, which is for the number of workers that is asked for."""
    response = client.get(f"/api/steps?{query}")
    assert response.status_code == 200, response.text
    lines = response.iter_encoded()
    assert json.loads(next(lines))["total"] > 1
    first: dict[str, Any] = json.loads(next(lines))
    response.close()  # so that the others are not simulated
    return first


@pytest.mark.parametrize("key", LOCKSTEP)
def test_a_step_takes_what_it_does_in_an_ordinary_simulation(
    client: FlaskClient, key: str, tmp_path: Path
) -> None:
    """Of two runs of different length the further steps are those in full course."""
    query = f"megabytes=8&workers=4&variation=0&latency_us=40&compute_ms=20&strategies={key}"
    told = _step(client, query)
    assert told["workers"] == 4
    situation = Situation(8.0, 4, variation=0.0, latency_us=40.0, compute_ms=20.0)
    long = ENTRIES[key].steps
    seconds = []
    for steps in (long, 2 * long):
        run = run_of(situation, ENTRIES[key].notation_for(4), steps)
        cluster = f"lan_1gbit(nodes={run.training.ranks}, latency='20 us', jitter=None)"
        run = replace(run, training=replace(run.training, cluster=cluster))
        workers = simulated_here(run, tmp_path / str(steps)).results[:4]
        seconds.append(max(worker.train_seconds for worker in workers))
    assert told["step"] == pytest.approx((seconds[1] - seconds[0]) / long, rel=5e-3)
    assert told["samples_per_second"] == pytest.approx(4 * 32 / told["step"])
    parts = told["compute"] + told["communicate"] + told["wait"]
    assert parts == pytest.approx(told["step"], rel=0.01)


@pytest.mark.parametrize("entry", MENU, ids=lambda entry: entry.key)
def test_every_strategy_has_a_step_and_its_course(client: FlaskClient, entry: MenuEntry) -> None:
    query = f"megabytes=1&workers=3&strategies={entry.key}"
    assert _step(client, query).get("step", 0) > 0.09
    course = client.get(f"/api/course?{query}").json
    assert course is not None
    ranks = len(course["ranks"])
    assert ranks == 3 + any(rank["role"] == "server" for rank in course["ranks"])
    for rank in course["ranks"]:
        for begin, end, *_ in rank["main"] + rank["behind"]:
            assert 0 <= begin < end <= course["seconds"]
    assert course["messages"] == sorted(course["messages"])
    for begin, end, source, target, size in course["messages"]:
        assert begin < course["seconds"]
        assert end > max(begin, 0)
        assert source != target
        assert max(source, target) < ranks
        assert size > 0


def test_the_messages_of_a_ring_are_the_bytes_of_the_formula(client: FlaskClient) -> None:
    query = "megabytes=1&workers=4&strategies=ring&compute_ms=1000&variation=0"
    course = client.get(f"/api/course?{query}").json
    assert course is not None
    assert course["bytes"] == pytest.approx(2 * 3 * 1e6, rel=1e-3)  # 2 (N - 1)/N n of N workers
    assert {(target - source) % 4 for _, _, source, target, _ in course["messages"]} == {1}


def test_a_slow_worker_holds_up_a_ring_and_leaves_others_alone_with_a_server(
    client: FlaskClient,
) -> None:
    def step(key: str, slow: int) -> float:
        query = f"megabytes=0.1&workers=4&slow={slow}&variation=0&strategies={key}"
        return float(_step(client, query)["step"])

    assert step("ring", 5) > 4.5 * step("ring", 1)
    assert step("asynchronous", 5) < 1.5 * step("asynchronous", 1)  # 4 / 3.2 = 1.25 at best


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("workers=1", "workers: 1 is below 2"),
        ("workers=many", "workers: expected whole number, got 'many'"),
        ("megabytes=nan", "megabytes"),
        ("workrs=4", "did you mean 'workers'"),
        ("strategies=rings", "did you mean 'ring'"),
    ],
)
def test_bad_input_is_a_line(client: FlaskClient, query: str, told: str) -> None:
    for path in ("steps", "course"):
        response = client.get(f"/api/{path}?{query}")
        assert response.status_code == 400
        assert told in response.text
        assert response.text.count("\n") == 1


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "10.0.0.1:8000"])
def test_other_hosts_are_refused(client: FlaskClient, host: str) -> None:
    for path in ("/", "/api/menu"):
        assert client.get(path, headers={"Host": host}).status_code == 403


def test_pages_of_strangers_are_refused(client: FlaskClient) -> None:
    strange = {"Sec-Fetch-Site": "cross-site"}
    assert client.get("/api/steps?strategies=ring", headers=strange).status_code == 403
    for host in ("localhost", "localhost:1", "[::1]:8000", "127.0.0.1"):
        assert client.get("/api/menu", headers={"Host": host}).status_code == 200


def test_files_are_those_of_the_page_only(client: FlaskClient) -> None:
    for name in ("", "page.css", "studio.css", "studio.js", "figures.js", "player.js"):
        assert client.get(f"/{name}").status_code == 200
    for name in ("server.py", "../server.py", "page.html", "%2e%2e/server.py"):
        assert client.get(f"/{name}").status_code == 404


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[SimulationJob]:
    """What was simulated, which takes no time here."""
    carried_out: list[SimulationJob] = []

    def carry_out(job: SimulationJob) -> dict[str, Any]:
        carried_out.append(job)
        return {"step": 1.0}

    monkeypatch.setattr(server, "carry_out", carry_out)
    return carried_out


def _jobs(workers: int) -> list[SimulationJob]:
    return [SimulationJob("step", Situation(workers=workers), entry) for entry in MENU]


def test_a_newer_question_of_a_page_ends_the_older_one(done: list[SimulationJob]) -> None:
    with ThreadPoolExecutor(1) as pool:
        simulator = Simulator(pool, 1)
        older = simulator.answers("page", _jobs(4))
        assert next(older)[0] == _jobs(4)[0]
        other = simulator.answers("another page", _jobs(6))
        next(other)
        assert [job for job, _ in simulator.answers("page", _jobs(5))] == _jobs(5)
        assert list(older) == []
        assert len(list(other)) == len(MENU) - 1
    assert len([job for job in done if job.situation.workers == 4]) == 1


def test_what_was_simulated_is_kept(done: list[SimulationJob]) -> None:
    with ThreadPoolExecutor(1) as pool:
        simulator = Simulator(pool, 1)
        for _ in range(2):
            assert len(list(simulator.answers("page", _jobs(4)))) == len(MENU)
    assert done == _jobs(4)


def test_without_flask_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flask", None)
    monkeypatch.delitem(sys.modules, "orchestra.studio.server", raising=False)
    assert main(["studio"]) == 2
    assert "pip install '.[studio]'" in capsys.readouterr().err


def test_ports_that_cannot_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70_000):
            assert main(["studio", "--port", str(port)]) == 2
            told = capsys.readouterr().err
            assert f"--port: {port}" in told
            assert told.count("\n") == 1


def test_the_command_serves_until_it_is_ended() -> None:
    command = [sys.executable, "-m", "orchestra.cli.main", "studio"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as studio:
        assert studio.stdout is not None
        address = studio.stdout.readline().split()[2]
        try:
            assert address.startswith("http://127.0.0.1:")
            with urlopen(address) as page:
                assert b"Orchestra studio" in page.read()
        finally:
            studio.send_signal(signal.SIGTERM)  # as Ctrl-C, which a test's children may ignore
        assert studio.wait() == 0
