"""The schemas for editors accept the files that Orchestra reads, and know a mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from tests.support.commands import run
from tests.support.paths import ROOT

from orchestra.cluster.file import KEYS
from orchestra.cluster.schema import cluster_schema
from orchestra.experiments.file import KNOWN_KEYS
from orchestra.experiments.schema import experiment_schema

SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "experiment": experiment_schema(),
    "cluster": cluster_schema(),
}


def files() -> Iterator[Any]:
    """Yield the kind and the content of each file of the examples and studies."""
    for path in sorted([*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("studies/**/*.yaml")]):
        content = yaml.safe_load(path.read_text())
        if isinstance(content, dict) and "strategies" in content:
            yield pytest.param("experiment", content, id=str(path.relative_to(ROOT)))
        elif isinstance(content, dict) and "nodes" in content:
            yield pytest.param("cluster", content, id=str(path.relative_to(ROOT)))


def complaints(kind: str, content: object) -> list[str]:
    return [error.message for error in Draft202012Validator(SCHEMAS[kind]).iter_errors(content)]


@pytest.mark.parametrize(("kind", "content"), [*files()])
def test_it_accepts_the_files_of_the_repository(kind: str, content: object) -> None:
    assert not complaints(kind, content)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_it_is_a_schema_that_the_command_prints(kind: str, tmp_path: Path) -> None:
    Draft202012Validator.check_schema(SCHEMAS[kind])
    ended = run(["schema", kind], tmp_path)
    assert (ended.status, ended.err) == (0, "")
    assert json.loads(ended.out) == SCHEMAS[kind]


def test_it_has_the_keys_that_the_files_may_have() -> None:
    assert {*SCHEMAS["experiment"]["properties"]} == {*KNOWN_KEYS}
    assert {*SCHEMAS["cluster"]["properties"]} == {*KEYS}


GOOD = {"task": "digits", "strategies": {"ring": "AllReduce"}}
NODE = {"cores": 4, "speed": 1, "loopback": {"bandwidth": "3 GB/s", "latency": "15 us"}}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("experiment", {"task": "digits"}),
        ("experiment", {**GOOD, "stepz": 3}),
        ("experiment", {**GOOD, "steps": "three"}),
        ("experiment", {**GOOD, "ranks": 0}),
        ("experiment", {**GOOD, "equal": "batch"}),
        ("experiment", {**GOOD, "target": {"metric": "accuracy", "atleast": 0.9}}),
        ("cluster", {"nodes": {"a": NODE}}),
        ("cluster", {"nodes": {"a": {**NODE, "cpus": 4}}, "ranks": "spread"}),
        ("cluster", {"nodes": {"a": {**NODE, "memory": "16"}}, "ranks": "spread"}),
        ("cluster", {"nodes": {"a": NODE}, "ranks": "everywhere"}),
        ("cluster", {"nodes": {"a": NODE}, "ranks": "spread", "faults": [{"Deth": {"of": "a"}}]}),
    ],
)
def test_it_knows_a_mistake(kind: str, content: object) -> None:
    assert complaints(kind, content)


def test_an_unknown_kind_is_bad_input(tmp_path: Path) -> None:
    ended = run(["schema", "clusters"], tmp_path)
    assert ended.status == 2
    assert len(ended.err.splitlines()) == 1
