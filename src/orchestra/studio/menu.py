"""The contents of the page: a situation's controls, and the strategies. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestra.cluster import Cluster
from orchestra.cluster.nodes import Link, LogNormal, NetworkSwitch, Node
from orchestra.cluster.presets import LOOPBACK
from orchestra.errors import InputError, nearest
from orchestra.settings import Settings, setting
from orchestra.settings.reading import literal

BATCH = 32  # the samples of a worker's batch; only the scale of samples/s depends on it
MOST_WORKERS = 64
ROUND = 8  # the steps between two exchanges of strategies that exchange seldom


@dataclass(frozen=True, repr=False)
class Situation(Settings):
    """The properties of a data-parallel training on which the time of its steps depends."""

    megabytes: float = setting(100.0, "of parameters, in float32", low=0.1, high=1000)
    workers: int = setting(8, "that compute gradients", low=2, high=MOST_WORKERS)
    megabits: float = setting(
        1000.0, "Mbit/s of each node's link, in each direction", low=1, high=100_000
    )
    latency_us: float = setting(
        100.0, "microseconds from node to node, one way", low=1, high=100_000
    )
    compute_ms: float = setting(
        100.0, "milliseconds of a gradient of one worker's batch", low=1, high=10_000
    )
    slow: float = setting(
        1.0, "how many times as long the last worker takes to compute", low=1, high=10
    )
    variation: float = setting(
        5.0, "percent by which each duration of compute varies", low=0, high=50
    )

    @staticmethod
    def read(values: Mapping[str, str]) -> Situation:
        """Return the situation that a query's texts describe; what is left out has its default.
        Raises `InputError` for a name that is not known, and for a text that is no number in its
        range."""
        # Setting by setting, so that each refusal names its control
        situation = Situation()
        for name, text in values.items():
            situation = situation.with_setting(name, literal(text))
        return situation

    def cluster(self, nodes: int) -> Cluster:
        """Equal nodes at one switch; that of the last worker computes more slowly."""
        # Two links lie between two nodes, so each has half of the latency
        link = Link(self.megabits * 1e6 / 8, self.latency_us * 1e-6 / 2)
        jitter = LogNormal(self.variation / 100) if self.variation else None
        cores = 4  # one for the gradient, the others for messages in the background
        parts = tuple(
            Node(
                f"worker-{index}" if index < self.workers else f"server-{index}", cores,
                speed=1 / self.slow if index == self.workers - 1 else 1.0,
                jitter=jitter, switch="switch", up=link, down=link, loopback=LOOPBACK,
            )
            for index in range(nodes)
        )  # fmt: skip
        return Cluster("studio", parts, (NetworkSwitch("switch"),), placement="spread")


@dataclass(frozen=True)
class MenuEntry:
    """A strategy on the page.

    A step of an `exact` strategy is worth one of a single process on the batches of all workers. A
    step of others may be worth less, since gradients are stale or dropped, or replicas differ.
    """

    key: str
    name: str
    notation: str  # may contain {servers}, their number, which is at most that of the workers
    does: str  # in a step
    pays: str  # when the strategy is a good choice
    exact: bool = True
    shown: bool = True
    steps: int = 3  # that are simulated
    skip: int = 1  # the first ones, left out: until all ranks have started
    round: int = 1  # steps after which the pattern repeats

    def notation_for(self, workers: int) -> str:
        """Return the notation for `workers` workers."""
        # Servers beside workers: no more than there are nodes
        return self.notation.replace("{servers}", str(min(4, workers)))


MENU = (
    MenuEntry(
        "ring", "all-reduce, ring", 'AllReduce("ring")',
        "Each worker sends pieces of the gradient to its neighbour, first to add them up, then to "
        "pass the sums on, so that each sends about twice the model, however many workers there "
        "are.",
        "It pays where bandwidth is scarce and machines are alike; with many workers and a small "
        "model the latencies of its 2 (N - 1) rounds add up.",
    ),
    MenuEntry(
        "halving", "all-reduce, halving-doubling", 'AllReduce("halving_doubling")',
        "Partners exchange halves, quarters, eighths of the gradient and then go back the same "
        "way: as many bytes as a ring, in 2 log2(N) rounds.",
        "It pays with many workers and long latencies; where N is no power of two, the workers "
        "beyond it send their whole gradient to a partner first.",
    ),
    MenuEntry(
        "tree", "all-reduce, tree", 'AllReduce("tree")',
        "Gradients are added up along a binary tree to its root, and the sum comes down again; a "
        "worker sends up to three times the model.",
        "It pays for models of a few kilobytes, where only the number of rounds counts; for large "
        "ones the workers in the middle of the tree carry too much.",
    ),
    MenuEntry(
        "sharded", "sharded parameters (FSDP)", 'AllReduce(shard="parameters")',
        "Each worker keeps 1/N of parameters, gradients and optimizer, gathers a bucket of layers "
        "when it needs them, in forward and in backward, and sends up to 3 (N - 1)/N of the model.",
        "It pays in memory, not in time: a model that fits no worker trains at all, for half as "
        "many bytes again as a ring sends.",
    ),
    MenuEntry(
        "backup", "all-reduce, the first N - 1", "AllReduce(backup=1)",
        "In each step only the first N - 1 gradients are averaged; the last one comes too late and "
        "is dropped.",
        "It pays with one slow or unsteady worker, whose work is then lost; of alike workers it "
        "throws a gradient away in each step.",
        exact=False, shown=False,
    ),
    MenuEntry(
        "server", "one server, synchronous", "ParameterServer()",
        "All workers push their gradients to one server, a machine of its own, which averages "
        "them, updates the parameters and sends these back to all.",
        "It pays with few workers or a small model; the link of the server carries N models each "
        "way in a step, and soon everybody waits for it.",
    ),
    MenuEntry(
        "servers",
        "four servers, synchronous",
        'ParameterServer(servers={servers}, placement="beside")',
        "The parameters are cut into four slices, each with a server beside one of the first "
        "workers, so that the traffic is spread over four links.",
        "It pays over one server whenever that one is the bottleneck, and needs no machine to "
        "spare; with more workers than servers these links fill up again.",
    ),
    MenuEntry(
        "asynchronous", "one server, asynchronous", 'ParameterServer(consistency="asynchronous")',
        "The server applies each gradient when it arrives and answers at once, so that nobody "
        "waits for a slow worker.",
        "It pays where workers are unlike or unsteady, and the server's link is fast enough; "
        "gradients are stale by then, so that a step is worth less.",
        exact=False, steps=8, skip=3,
    ),
    MenuEntry(
        "local", "local SGD, every 8 steps", f"LocalSGD({ROUND})",
        "Each worker trains alone for 8 steps; then all replicas are averaged, with one all-reduce "
        "for 8 steps.",
        "It pays on slow networks, since it sends an eighth of the bytes; replicas drift apart "
        "meanwhile, and the more steps lie between, the less each is worth.",
        exact=False, steps=2 * ROUND, skip=ROUND, round=ROUND,
    ),
    MenuEntry(
        "elastic", "elastic averaging, every 8", f"ElasticAveraging({ROUND})",
        "Each worker trains alone, and every 8 of its steps it and a centre on a server pull each "
        "other closer, without waiting for other workers.",
        "It pays on slow networks with unlike workers; the server's link carries N models each "
        "way in 8 steps.",
        exact=False, shown=False, steps=2 * ROUND, skip=ROUND, round=ROUND,
    ),
    MenuEntry(
        "gossip", "gossip on a ring (D-PSGD)", "Gossip(Ring())",
        "Each worker mixes its parameters with those of its two neighbours while it computes its "
        "gradient, and never hears of the others directly.",
        "It pays where latency is long: a step has one round, whatever the number of workers; what "
        "one learns takes up to N/2 steps to reach everybody.",
        exact=False,
    ),
    MenuEntry(
        "push", "stochastic gradient push", "StochasticGradientPush()",
        "Each worker sends its parameters, with a weight, to one other worker that changes from "
        "step to step, and averages what it receives.",
        "It pays with many workers: one model sent in a step, half of what a ring sends, and in "
        "log2(N) steps word gets round; replicas differ a little all the time.",
        exact=False,
    ),
    MenuEntry(
        "pairs", "pairwise averaging (AD-PSGD)", "PairwiseAveraging()",
        "Each worker averages its parameters with those of a random partner while it computes, and "
        "waits for that one at most.",
        "It pays with slow or unsteady workers, which hold up nobody but a partner; each exchange "
        "takes a model in both directions.",
        exact=False, shown=False, steps=8, skip=3,
    ),
)  # fmt: skip
ENTRIES = {entry.key: entry for entry in MENU}


def entry_of(key: str) -> MenuEntry:
    """Return the strategy with this key; raise `InputError` for an unknown key."""
    if key not in ENTRIES:
        raise InputError(f"unknown strategy {key!r}; {nearest(key, ENTRIES)}")
    return ENTRIES[key]
