"""The strategies of the contract, one row each, and the numbers of ranks that they run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.tasks_for_tests import FirstDecides, Unequal

from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES


@dataclass(frozen=True)
class Row:
    """A strategy, by its notation or as an object; `smallest` ranks leave it one worker.

    `sizes` are the numbers of ranks, of those that are tried, that it can run on. Where it is a
    `variant` of another row, with its own bits shown elsewhere, it trains to the end in the lab.
    """

    label: str
    strategy: Any
    smallest: int = 1
    exact: bool = True  # with one worker it equals Single bit for bit
    damped: bool = False  # needs a learning rate divided by the workers, against staleness
    fresh: bool = False  # no update can be stale, though it is not synchronous
    notices: tuple[str, ...] = ()  # that it gives, each once or by several ranks
    sizes: tuple[int, ...] = (2, 3, 4, 5)
    variant: bool = False

    def build(self) -> Any:
        if isinstance(self.strategy, str):
            return parse(self.strategy, STRATEGIES, where=self.label)
        return self.strategy


SERVER = "ParameterServer"
ASYNCHRONOUS = 'consistency="asynchronous"'
TABLE = [
    Row("single", "Single()"),
    Row("ring", 'AllReduce("ring")'),
    Row("ring_gather", 'AllReduce("ring_gather")', variant=True),
    Row("parallel", 'AllReduce("parallel")', variant=True),
    Row("reduce_to_one", 'AllReduce("reduce_to_one")', variant=True),
    Row("native", 'AllReduce("native")'),
    Row("halving_doubling", 'AllReduce("halving_doubling")', variant=True),
    Row("butterfly", 'AllReduce("butterfly")', variant=True),
    Row("tree", 'AllReduce("tree")', variant=True),
    Row("hierarchical", 'AllReduce("hierarchical", ranks_per_node=2)', variant=True),
    Row("sharded optimizer", 'AllReduce(shard="optimizer")', variant=True),
    Row("sharded gradients", 'AllReduce(shard="gradients")', variant=True),
    Row("sharded parameters", 'AllReduce(shard="parameters")'),
    Row("partial all-reduce", "AllReduce(backup=1)", 2, exact=False),
    Row("server", f"{SERVER}()", 2),
    Row("server beside", f'{SERVER}(placement="beside")'),
    Row("server returns gradients", f'{SERVER}(returns="gradients")', 2, variant=True),
    Row("gradients beside", f'{SERVER}(placement="beside", returns="gradients")', variant=True),
    Row("servers", f"{SERVER}(servers=2)", 3, variant=True),
    Row("servers beside", f'{SERVER}(servers=2, placement="beside")', 2, exact=False, variant=True),
    Row("asynchronous", f"{SERVER}({ASYNCHRONOUS})", 2, damped=True),
    Row("asynchronous beside", f'{SERVER}({ASYNCHRONOUS}, placement="beside")', damped=True,
        variant=True),
    Row("asynchronous servers", f"{SERVER}(servers=2, {ASYNCHRONOUS})", 3, damped=True,
        variant=True),
    Row("bounded", f'{SERVER}(consistency="bounded", staleness=1)', 2, damped=True),
    Row("delay compensation", f'{SERVER}({ASYNCHRONOUS}, delay_compensation="constant")', 2,
        damped=True, variant=True),
    Row("adaptive compensation", f'{SERVER}({ASYNCHRONOUS}, placement="beside", '
        'delay_compensation="adaptive")', damped=True, variant=True),
    Row("rate divided", f'{SERVER}({ASYNCHRONOUS}, learning_rate="divided")', 2, variant=True),
    Row("rate by staleness", f'{SERVER}({ASYNCHRONOUS}, learning_rate="by_staleness")', 2,
        variant=True),
    Row("buffered", f"{SERVER}(consistency=Buffered(2), learning_rate=PolynomialStaleness(0.5))", 2,
        damped=True, exact=False),
    Row("own server rule", f"{SERVER}(consistency=examples.own_server_rule:Majority(), "
        "learning_rate=examples.own_server_rule:Limited(9))", 2, damped=True, variant=True),
    Row("replicas", f"{SERVER}(servers=2, replicas=1)", 3, variant=True),
    Row("backup workers", f'{SERVER}(placement="beside", backup=1)', 2, exact=False),
    Row("switch to bounded", f'Switch(AllReduce(), {SERVER}(consistency="bounded", staleness=2, '
        'learning_rate="divided"), when=AfterSteps(10))', 2, exact=False, variant=True),
    Row("gossip", "Gossip()", fresh=True),
    Row("hop", "Hop(Complete(), backup=1)", fresh=True, sizes=(3, 4, 5)),
    Row("hop, skipping", "Hop(staleness=4, skip=4)", fresh=True, variant=True),
    Row("push", "StochasticGradientPush()", fresh=True),
    Row("overlapped push", 'StochasticGradientPush(overlap=1, weights="random")', fresh=True),
    Row("pairwise", "PairwiseAveraging()"),
    Row("groups", "Prague(2)", fresh=True),
    Row("local", "LocalSGD(4)", fresh=True),
    Row("DiLoCo", "LocalSGD(4, outer=Nesterov(1.0, 0.0))", fresh=True, variant=True),
    Row("streaming", "LocalSGD(6, outer=SlowMo(0.2), fragments=2, overlap=2)", fresh=True,
        exact=False),
    Row("elastic", "LocalSGD(2, outer=Elastic())", fresh=True, exact=False),
    Row("elastic server", "ElasticAveraging(4)", 2, exact=False),
    Row("elastic, momentum", 'ElasticAveraging(4, momentum=0.5, servers=2, placement="beside")', 2,
        exact=False, variant=True),
    Row("elastic first", 'Switch(ElasticAveraging(4), AllReduce(), when=AfterSteps(10), '
        'moments="reset")', 2, exact=False, variant=True),
    Row("post-local", "Switch(AllReduce(), LocalSGD(4), when=AfterSteps(10))", fresh=True,
        variant=True),
    # of four layers
    Row("pipeline", "Pipeline(microbatches=1)", sizes=(2, 3, 4), variant=True),
    Row("pipeline, 1F1B", 'Pipeline(microbatches=4)', exact=False, sizes=(2, 3, 4)),
    Row("pipelines, GPipe", 'Pipeline(2, schedule="gpipe")', exact=False, sizes=(2, 4),
        variant=True),
    Row("strategy-switch", f'Switch(AllReduce("ring"), {SERVER}({ASYNCHRONOUS}), '
        'when=AfterSteps(10), learning_rate="divided")', 2, exact=False),
    Row("switch beside", f'Switch(AllReduce("ring"), {SERVER}({ASYNCHRONOUS}, '
        'placement="beside"), when=AfterSteps(10), learning_rate="divided")', variant=True),
    Row("switch back", f'Switch({SERVER}(), AllReduce(), when=AfterSteps(10), moments="reset")', 2,
        exact=False, variant=True),
    Row("asynchronous first", 'Switch(PairwiseAveraging(), AllReduce(), when=AfterFraction(0.5), '
        'moments="averaged")'),
    Row("gossip, judged", 'Switch(Gossip(), AllReduce(), when=LossStable(threshold=0.5) & '
        'AfterSteps(9), moments="averaged")', fresh=True, variant=True),
    Row("auto", 'Auto([AllReduce("ring"), LocalSGD(4)], samples=[9, 1])', fresh=True,
        variant=True),
    Row("own strategy", "examples.own_strategy:DynamicAveraging(0.1)", fresh=True),
    Row("unequal shares", Unequal()),
    Row("first decides", FirstDecides()),
]  # fmt: skip
SIZES = [3, *(pytest.param(n, marks=pytest.mark.lab) for n in (2, 4, 5))]


def with_sizes(rows: Sequence[Row]) -> list[Any]:
    """Each row with each number of ranks that it runs on; all but one, mostly 3, in the lab, as
    all of a variant."""
    found = []
    for row in rows:
        sizes = [size for size in row.sizes if size >= row.smallest]
        for size in sizes:
            usual = size == (3 if 3 in sizes else sizes[0]) and not row.variant
            marks = () if usual else (pytest.mark.lab,)
            found.append(pytest.param(row, size, id=f"{row.label}-{size}", marks=marks))
    return found
