"""What all tests have in common: threads, hypothesis, the warm server, and the order of files."""

from __future__ import annotations

import functools
import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import vl_convert
from hypothesis import HealthCheck, settings

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: bits depend on it

# No outcome depends on how busy the machine is, nor on chance; `--hypothesis-profile random`
# looks for examples that no run has seen yet, and for more of them.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeated", _PATIENT, derandomize=True, database=None, max_examples=40)
settings.register_profile("random", _PATIENT)
settings.load_profile("repeated")

LONGEST = (
    "test_injection",
    "test_page_blocks",
    "test_contract",
    "test_launched",
    "test_report_page",
    "test_own_loop_processes",
    "test_failures",
    "test_hosts",
    "test_map",
    "test_restarts",
    "test_joining",
    "test_processes",
    "test_report_browser",
    "test_resume",
    "test_shm",
    "test_losses",
    "test_simulated_losses",
    "test_server_deaths",
    "test_switch_checkpoints",
    "test_own_loop",
    "test_transformers",
    "test_training_features",
    "test_simulation_faults",
    "test_command_table",
    "test_sharded_parameters",
    "test_compressed_training",
    "test_simulation",
    "test_switch",
    "test_calibrate",
    "test_engine_kubernetes",
    "test_simulated_joins",
    "test_studio_browser",
    "test_overlap",
    "test_paced_phases",
    "test_equals_ddp",
    "test_simulation_collectives",
    "test_own_loop_backward",
    "test_testing",
    "test_host_memory",
    "test_auto",
    "test_replay",
    "test_site",
)
"""Files that begin first, lest one worker still has a long one when the others are done."""


def pytest_configure(config: pytest.Config) -> None:
    """Hide installed plug-ins, which tables of all names in tests do not know. Start the server of
    warm processes while workers collect; they find it by a variable.
    """
    from orchestra.cluster import CLUSTERS
    from orchestra.strategies.registry import STRATEGIES
    from orchestra.tasks import TASKS
    from orchestra.trainer.balancing import BALANCINGS

    for registry in (BALANCINGS, CLUSTERS, STRATEGIES, TASKS):
        vars(registry)["_all"] = registry._known
    if getattr(config.option, "numprocesses", None):
        from tests.support import warm

        os.environ[warm.SERVER] = warm.server()


@pytest.fixture(scope="session", autouse=True)
def _bundled_once() -> Iterator[None]:
    """Pages have the same library of figures, and to bundle it takes longer than the rest."""
    bundle = functools.cache(vl_convert.javascript_bundle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vl_convert, "javascript_bundle", bundle)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks() -> Iterator[None]:
    """What tests write need not outlast the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(params=[False, True], ids=["messages", "lanes"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether compiled code moves collectives, over connections of their own; run both ways."""
    from orchestra.transports import executor

    wanted: bool = request.param
    if wanted and not executor.is_there():
        pytest.skip("the executor is not compiled")
    if not wanted:
        monkeypatch.setenv("ORCHESTRA_COMPILED", "0")
    return wanted


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each worker begin with other files: what one has compiled the others read."""
    report = yield
    worker: dict[str, Any] | None = getattr(collector.config, "workerinput", None)
    if worker and isinstance(collector, pytest.Dir):
        files = report.result or []
        first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = [*files[first:], *files[:first]]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each worker take the files in the order of `LONGEST`, the others after them by name."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.stem, len(place)), item.path))
