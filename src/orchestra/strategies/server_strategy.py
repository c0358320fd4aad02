"""Where parameter servers are placed, and which settings of them do not go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestra.errors import InputError
from orchestra.parameter_server.when import When
from orchestra.strategies.base import Roles
from orchestra.strategies.traits import Footprint

if TYPE_CHECKING:
    from orchestra.strategies.parameter_server import ParameterServer
    from orchestra.worker.worker import Worker

NOTHING = Footprint(0.0, 0.0, 0.0, 0.0, 0.0)
"""Of a rank without data that serves nothing."""


def placed_roles(name: str, ranks: int, servers: int, placement: str, replicas: int = 0) -> Roles:
    """Return the roles with `servers` "dedicated" or "beside" workers, for the strategy `name`."""
    beside = placement == "beside"
    if beside and servers > ranks:
        raise InputError(
            f"{name}: {servers} servers beside workers need as many ranks, "
            f"not {ranks}: lower servers or raise ranks"
        )
    if beside and replicas and servers == ranks:
        raise InputError(
            f"{name}: {servers} servers beside {ranks} workers leave none "
            "that could evaluate after any server's death: lower servers or raise ranks"
        )
    workers = ranks if beside else ranks - servers
    if workers < 1:
        raise InputError(
            f"{name}: {ranks} ranks with {servers} dedicated servers leave no "
            "worker: raise ranks, lower servers, or set placement='beside'"
        )
    owners = range(servers) if beside else range(workers, ranks)
    shares = (1.0,) * workers + (0.0,) * (ranks - workers)
    return Roles(shares, tuple(owners), replicas=replicas)


# Which settings of `ParameterServer` do not go together, and why

ON_ARRIVAL = "consistency='asynchronous', or 'bounded' with a staleness above 0"


def contradictions(given: ParameterServer) -> Iterator[str]:
    """Yield what is wrong with settings that do not go together."""
    yield from _wrong_consistency(given)
    yield from _wrong_replicas(given) if given.replicas else ()
    if isinstance(given.slices, tuple) and len(given.slices) != given.servers:
        yield f"slices={given.slices} is not one weight for each of {given.servers} servers"
    if given.lambda0 is not None and given.delay_compensation == "none":
        yield "lambda0 needs delay_compensation='constant' or 'adaptive'"
    if given.mean_square is not None and given.delay_compensation != "adaptive":
        yield "mean_square needs delay_compensation='adaptive'"
    if given.compression is not None and not given.compression.decodable_alone:
        yield (
            f"a server cannot read a payload of {given.compression!r} without those of all "
            "workers: take AllReduce, or another compressor (SignSGD with vote=False)"
        )
    if given.backup and (given.servers > 1 or given.returns == "gradients"):
        yield (
            "backup needs servers=1 and returns='parameters': several servers would not drop "
            "the same gradients, and a late worker would miss updates"
        )
    if given.backup and given.compression is not None:
        yield (
            "backup does not go with compression: what waits for a later step would count on "
            "gradients that are dropped"
        )


def contradictions_with(given: ParameterServer, worker: Worker) -> Iterator[str]:
    """Yield what is wrong with settings, given what `worker` has."""
    if given.backup and worker.own_loop:
        yield (
            "backup needs orchestra's own loop (orchestra train): a late worker passes over "
            "batches, which a loop of your own cannot"
        )
    if given.replicas and given.averages and worker.clip_norm is not None:
        yield (
            f"replicas=1 with clip_norm needs {ON_ARRIVAL}, where workers clip: synchronous "
            "servers clip together, and the death of one would cut that short"
        )


def _wrong_consistency(given: ParameterServer) -> Iterator[str]:
    """Yield what does not go with `consistency`."""
    bounded = given.consistency == "bounded"
    same = "a synchronous server averages gradients of the same parameters"
    if given.staleness is not None and not bounded:
        yield f"staleness={given.staleness} needs consistency='bounded', not {given.consistency!r}"
    if given.staleness is None and bounded:
        yield (
            "consistency='bounded' needs its bound: give both, as in ParameterServer("
            "consistency='bounded', staleness=1), or set consistency='asynchronous'"
        )
    if given.averages and given.learning_rate != "kept":
        yield f"learning_rate={given.learning_rate!r} needs {ON_ARRIVAL}: {same}"
    if given.averages and given.delay_compensation != "none":
        yield f"delay_compensation={given.delay_compensation!r} needs {ON_ARRIVAL}: {same}"
    if given.returns == "gradients" and not given.averages:
        yield (
            f"returns='gradients' needs consistency='synchronous': a server that is "
            f"{given.consistency} has no average to return"
        )
    if given.backup and (isinstance(given.consistency, When) or not given.averages):
        yield (
            f"backup needs consistency='synchronous': where it is {given.consistency!r}, no "
            "gradient comes too late"
        )


def _wrong_replicas(given: ParameterServer) -> Iterator[str]:
    """Yield what does not go with `replicas`."""
    if given.servers < 2:
        yield (
            "replicas=1 needs servers=2 or more: the replica of a server's slice lies on the "
            "next server"
        )
    if given.returns == "gradients":
        yield (
            "replicas=1 needs returns='parameters': servers that only average keep nothing "
            "that could be lost"
        )
    if given.averages and given.placement == "beside":
        yield (
            f"replicas=1 beside workers needs {ON_ARRIVAL}: with a server its worker dies, "
            "and a synchronous step needs all workers; or set placement='dedicated'"
        )
