"""The example for Kubernetes: the job has the documented shape, and its pods do as it says."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from tests.support.commands import Started, run
from tests.support.free_ports import free_port
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

JOB = ROOT / "examples/engines/pytorchjob.yaml"
EXPERIMENT = ROOT / "examples/engines/digits.yaml"


def shape(required: str = "", **properties: Any) -> dict[str, Any]:
    """A mapping with these keys alone."""
    return {
        "type": "object", "properties": properties, "required": required.split(),
        "additionalProperties": False,
    }  # fmt: skip


def listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
NAMED = shape("name", name=TEXT)
CONTAINER = shape(
    "name image",
    name={"const": "pytorch"},  # by which the operator knows the container of the training
    image=TEXT,
    command=listed(TEXT),
    ports=listed(shape("name containerPort", name=TEXT, containerPort=COUNT)),
    resources=shape(limits={"type": "object", "additionalProperties": TEXT}),
    volumeMounts=listed(shape("name mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = shape("name", name=TEXT, configMap=NAMED, persistentVolumeClaim=shape("", claimName=TEXT))
POD = shape(
    "containers",
    containers=listed(CONTAINER),
    volumes=listed(VOLUME),
    terminationGracePeriodSeconds=COUNT,
)
REPLICAS = shape(
    "replicas template",
    replicas=COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=shape("spec", spec=POD),
)
PYTORCHJOB = shape(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=NAMED,
    spec=shape(
        "pytorchReplicaSpecs",
        runPolicy=shape(cleanPodPolicy={"enum": ["All", "Running", "None"]}, backoffLimit=COUNT),
        pytorchReplicaSpecs=shape("Master Worker", Master=REPLICAS, Worker=REPLICAS),
    ),
)
"""The part of the documented resource that the example uses."""


def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(JOB.read_text())
    return found


def test_the_job_has_the_documented_shape() -> None:
    Draft202012Validator(PYTORCHJOB).validate(job())
    for specification in job()["spec"]["pytorchReplicaSpecs"].values():
        pod = specification["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in pod["volumes"]}
        grace = float(container["command"][-1].removeprefix("grace="))
        assert grace < pod["terminationGracePeriodSeconds"]


@contextmanager
def pods(folder: Path) -> Iterator[list[Started]]:
    """The command of the job in two processes, with the variables that the operator sets."""
    specification = job()["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    places = {"/experiment/digits.yaml": str(EXPERIMENT), "/runs/digits": str(folder / "record")}
    name, *arguments = specification["containers"][0]["command"]
    assert name == "orchestra"
    command = [sys.executable, "-m", name, *(places.get(each, each) for each in arguments)]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with ExitStack() as stack:
        yield [
            stack.enter_context(Started(command, folder, {**common, "RANK": str(rank)}))
            for rank in range(2)
        ]


def record(folder: Path) -> dict[str, Any]:
    (found,) = json.loads((folder / "record/summary.json").read_text())["runs"]
    assert isinstance(found, dict)
    return found


def has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("record/checkpoints/*/manifest.json"))


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.lab)])
def test_pods_that_come_back_after_a_loss_or_sigterm_go_on(lost: int, tmp_path: Path) -> None:
    with pods(tmp_path) as started:
        started[lost].wait_until(lambda: has_checkpoint(tmp_path), "a checkpoint")
        started[lost].process.send_signal(signal.SIGKILL)
        assert [each.end().status for each in started][1 - lost] == 1  # so the pod comes back
    with pods(tmp_path) as started:
        resumed = lambda: "resumed from checkpoint" in started[0].err()  # noqa: E731
        started[0].wait_until(resumed, "it goes on")
        started[1].process.send_signal(signal.SIGTERM)
        assert [each.end().status for each in started] == [143, 143]
    wait_until((tmp_path / "record/summary.json").exists, "the record")
    assert record(tmp_path)["status"] == "stopped"
    with pods(tmp_path) as started:
        ended = [each.end() for each in started]
    assert [each.status for each in ended] == [0, 0], ended
    assert "resumed from checkpoint" in ended[0].err
    assert record(tmp_path)["status"] == "completed"


def test_a_status_that_no_process_can_have_is_refused(tmp_path: Path) -> None:
    given = ["train", str(EXPERIMENT), "--out", "record", "--stopped-status", "256"]
    ended = run(given, tmp_path)
    assert ended.status == 2
    assert "--stopped-status: 256 is not 0 to 255" in ended.err
