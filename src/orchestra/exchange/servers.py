"""The server of a rank: made of a strategy's rules, for the slice that the rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from orchestra.collectives import Group
from orchestra.compression.base import Compressor
from orchestra.coordinator.core import Applied, Coordinator
from orchestra.exchange.agreement import charge
from orchestra.exchange.clipping import clip_together
from orchestra.exchange.compression import SliceCodec
from orchestra.exchange.slices import views_of_pieces
from orchestra.optimizers.spec import install_moments
from orchestra.parameter_server.beside import ServerBeside
from orchestra.parameter_server.held_slice import HeldSlice
from orchestra.parameter_server.how import Application, Correction, OptimizerStep
from orchestra.parameter_server.placement import Part, Slice
from orchestra.parameter_server.server import Server
from orchestra.parameter_server.state import ServerState
from orchestra.parameter_server.when import When
from orchestra.worker.worker import Worker


@dataclass(frozen=True)
class ServerRules:
    """What the servers of a strategy do with the pushes of its workers."""

    when: When
    application: type[Application]
    corrections: Sequence[Correction] = ()
    clips: bool = False  # an averaged gradient is clipped by the norm of all slices
    # Where workers take batches from a queue, their shares of a step; the server of the first slice
    # hands the batches out.
    queue_shares: tuple[float, ...] | None = None
    parts: Sequence[Part] = ()  # what pushes come in; none if they come slice by slice
    apply_per_part: bool = False  # a part is applied once all workers have pushed it
    compression: Compressor | None = None  # of pushes


def make_server(
    worker: Worker, slices: Sequence[Slice], workers: Sequence[int], rules: ServerRules
) -> Server:
    """Make the server of this rank, with the moments that `worker` has inherited, if any."""
    own = next(part for part in slices if part.rank == worker.rank)
    held = make_slice(worker, slices, own, workers, rules)
    beside = worker.rank in workers
    return ServerBeside(held, worker.transport) if beside else Server(held)


def make_slice(
    worker: Worker, slices: Sequence[Slice], part: Slice, workers: Sequence[int], rules: ServerRules
) -> HeldSlice:
    """Make the server's side of `part`, one of `slices`, with its optimizer and its state."""
    clip = None
    if rules.clips and worker.clip_norm is not None:
        servers = Group(tuple(each.rank for each in slices))
        clip = partial(clip_together, worker.clip_norm, servers, "reduce_to_one")
    decode = None
    if rules.compression is not None:
        decode = partial(SliceCodec(worker, rules.compression).decode_push, part)
    offer = partial(worker.snapshots.offer, offset=part.first)
    return HeldSlice(
        _server_state(worker, workers, rules, hands_out=part == slices[0]),
        _application(worker, part, rules.application),
        partial(charge, worker),
        corrections=rules.corrections,
        clip=clip,
        on_update=offer if rules.application.holds_model else None,
        parts=[each for each in rules.parts if slices[each.place] == part],
        apply_per_part=rules.apply_per_part,
        decode=decode,
    )


def _application(worker: Worker, part: Slice, kind: type[Application]) -> Application:
    """Make what applies updates to `part`; an optimizer gets the moments that were inherited."""
    values = worker.parameters[part.first : part.end].clone()
    if not issubclass(kind, OptimizerStep):
        return kind(values)
    tensors = views_of_pieces(worker.layout, part.pieces, values, part.first)
    optimizer = worker.optimizer.build({name: each for name, (each, _) in tensors.items()})
    install_moments(optimizer, tensors, worker.inherited)
    return kind(values, tensors, optimizer)


def _server_state(
    worker: Worker, workers: Sequence[int], rules: ServerRules, *, hands_out: bool
) -> ServerState:
    """Make the state of a slice; with `hands_out` its server has the coordinator."""
    live = set(workers) - worker.transport.lost()
    state = ServerState(rules.when, live, consumed=worker.step.consumed)
    if rules.queue_shares is None:
        return state
    queue = worker.make_queue(rules.queue_shares)
    if queue is None:
        return state
    state.applied, state.round = Applied.of(queue), queue.round
    if hands_out:
        state.coordinator = Coordinator(queue, gone=set(workers) - live)
    return state
