"""Where parameter servers are placed, and which settings of them do not go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestra.errors import InputError
from orchestra.parameter_server.when import ON_ARRIVAL, When
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


def contradictions(given: ParameterServer) -> Iterator[str]:
    """Yield what is wrong with settings that do not go together."""
    yield from _wrong_words(given)
    yield from given.when(1).contradictions(given)
    yield from given.application.contradictions(given)
    for setting, correction in given.corrections(1).items():
        yield from correction.contradictions(given, setting)
    yield from _wrong_replicas(given) if given.replicas else ()
    if given.compression is not None and not given.compression.decodable_alone:
        yield (
            f"a server cannot read a payload of {given.compression!r} without those of all "
            "workers: take AllReduce, or another compressor (SignSGD with vote=False)"
        )


def contradictions_with(given: ParameterServer, worker: Worker) -> Iterator[str]:
    """Yield what is wrong with settings, given what `worker` has."""
    yield from given.when(1).contradictions(given, own_loop=worker.own_loop)
    if given.replicas and given.averages and worker.clip_norm is not None:
        yield (
            f"replicas=1 with clip_norm needs {ON_ARRIVAL}, where workers clip: synchronous "
            "servers clip together, and the death of one would cut that short"
        )


def _wrong_words(given: ParameterServer) -> Iterator[str]:
    """Yield settings that belong to others, which are not there."""
    bounded = given.consistency == "bounded"
    if given.staleness is not None and not bounded:
        yield f"staleness={given.staleness} needs consistency='bounded', not {given.consistency!r}"
    if given.staleness is None and bounded:
        yield (
            "consistency='bounded' needs its bound: give both, as in ParameterServer("
            "consistency='bounded', staleness=1), or set consistency='asynchronous'"
        )
    if given.backup and (isinstance(given.consistency, When) or not given.averages):
        yield (
            f"backup needs consistency='synchronous': where it is {given.consistency!r}, no "
            "gradient comes too late"
        )
    if isinstance(given.slices, tuple) and len(given.slices) != given.servers:
        yield f"slices={given.slices} is not one weight for each of {given.servers} servers"
    if given.lambda0 is not None and given.delay_compensation == "none":
        yield "lambda0 needs delay_compensation='constant' or 'adaptive'"
    if given.mean_square is not None and given.delay_compensation != "adaptive":
        yield "mean_square needs delay_compensation='adaptive'"


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
