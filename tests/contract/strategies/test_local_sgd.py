"""Local SGD and its outer optimizers, against their papers' equations in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.lab import some
from tests.support.quadratic import Vector, final, mean_samples, start
from tests.support.training import Trained, train_threads

from orchestra.errors import InputError
from orchestra.settings import parse
from orchestra.strategies.base import Strategy
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.outer import Average, Elastic, Nesterov, Outer, SlowMo
from orchestra.strategies.registry import STRATEGIES

RATE = 0.1
BATCH = 4
RANKS = 3
SAMPLES = 62  # the last step has 2 for 3 workers


def train(
    strategy: Strategy,
    folder: Path,
    ranks: int = RANKS,
    samples: int = SAMPLES,
    **training: Any,
) -> Trained:
    training = {"optimizer": f"SGD(lr={RATE})", **training}
    return train_threads(
        strategy, ranks, folder, f"tests.support.quadratic:quadratic({samples})", batch_size=BATCH,
        **training,
    )  # fmt: skip


def averaged(x: list[Vector], samples: Vector) -> Vector:
    """Weighted by the samples behind each; they are all alike where there are none."""
    result: Vector = np.average(x, axis=0, weights=samples if samples.any() else None)
    return result


def followed(
    every: int,
    outer: Outer,
    ranks: int = RANKS,
    shares: tuple[float, ...] | None = None,
) -> Vector:
    """The same by hand: whole vectors, no fragments; the last round may be cut short."""
    x = [start() for _ in range(ranks)]
    begun, velocity, centre = start(), np.zeros_like(start()), start()
    samples = np.zeros(ranks)
    for step, parts in enumerate(mean_samples(ranks, BATCH, SAMPLES, shares), start=1):
        forces = [np.zeros_like(centre)] * ranks
        if isinstance(outer, Elastic) and step > 1 and (step - 1) % every == 0:
            forces = [outer.beta / ranks * (replica - centre) for replica in x]
            centre = centre + outer.beta * (averaged(x, samples) - centre)
            samples[:] = 0
        for rank, (mean, count) in enumerate(parts):
            gradient = x[rank] - mean if count else np.zeros_like(mean)
            x[rank] = x[rank] - RATE * gradient - forces[rank]
            samples[rank] += count
        if step % every or isinstance(outer, Elastic):
            continue
        average = averaged(x, samples)
        samples[:] = 0
        match outer:
            case Average():
                x = [average] * ranks
            case SlowMo(momentum=beta, rate=alpha):
                velocity = beta * velocity + (begun - average) / RATE
                begun = begun - alpha * RATE * velocity
                x = [begun] * ranks
            case Nesterov(rate=eta, momentum=mu):
                delta = begun - average
                velocity = mu * velocity + delta
                begun = begun - eta * (delta + mu * velocity)
                x = [begun] * ranks
    return centre if isinstance(outer, Elastic) else averaged(x, samples)


OUTERS = [
    Average(),
    SlowMo(0.4),
    SlowMo(0.4, rate=0.8),
    Nesterov(),
    Nesterov(0.5, 0.3),
    Elastic(0.6),
]


@pytest.mark.parametrize("every", some([1, 2, 3]))
@pytest.mark.parametrize("outer", OUTERS, ids=repr)
def test_every_outer_optimizer_is_its_papers(outer: Outer, every: int, tmp_path: Path) -> None:
    trained = train(LocalSGD(every, outer=outer), tmp_path)
    np.testing.assert_allclose(final(trained.final), followed(every, outer), rtol=1e-12)


def test_one_average_at_the_end_is_the_mean_of_runs_apart(tmp_path: Path) -> None:
    trained = train(LocalSGD(None), tmp_path)
    np.testing.assert_allclose(final(trained.final), followed(10**6, Average()), rtol=1e-12)


@pytest.mark.parametrize("every", [None, 3])  # of 8 steps
@pytest.mark.parametrize("outer", [Average(), Elastic(0.6)], ids=repr)
def test_every_average_is_weighted_by_the_samples_behind_it(
    every: int | None, outer: Outer, tmp_path: Path
) -> None:
    """The one at the end, too, and that of the last snapshot."""
    if every is None and isinstance(outer, Elastic):
        pytest.skip("a centre that nothing is averaged into")
    shares = (3.0, 1.0)
    trained = train(LocalSGD(every, outer=outer), tmp_path, 2, shares=shares, snapshots=2)
    expected = followed(every or 10**6, outer, 2, shares)
    np.testing.assert_allclose(final(trained.final), expected, rtol=1e-12)
    (leader,) = (report.leader for report in trained.reports if report.leader is not None)
    worth = leader.curve[-1].average or leader.curve[-1].metrics
    assert worth["loss"] == pytest.approx(leader.final_loss, rel=1e-14)


def test_rounds_of_epochs_average_after_each_pass(tmp_path: Path) -> None:
    passes = train(LocalSGD(every_epochs=1), tmp_path / "epochs", epochs=3, samples=60)
    steps = train(LocalSGD(5), tmp_path / "steps", epochs=3, samples=60)  # 60 samples, 12 a step
    apart = train(LocalSGD(None), tmp_path / "apart", epochs=3, samples=60)
    np.testing.assert_array_equal(final(passes.final), final(steps.final))
    assert passes.reports[0].bytes_sent > apart.reports[0].bytes_sent


@pytest.mark.parametrize("outer", [Average(), SlowMo(0.0), Nesterov(1.0, 0.0)], ids=repr)
def test_averaging_every_step_is_all_reduce(outer: Outer, tmp_path: Path) -> None:
    """With plain SGD the mean of the steps is the step of the mean."""
    local = train(LocalSGD(1, outer=outer), tmp_path / "local")
    reduced = train(parse("AllReduce('ring')", STRATEGIES, where="here"), tmp_path / "reduced")
    np.testing.assert_allclose(final(local.final), final(reduced.final), rtol=1e-12)


@pytest.mark.parametrize("outer", [Average(), SlowMo(0.0), Nesterov(1.0, 0.0)], ids=repr)
def test_one_worker_equals_single_at_outer_rate_1_without_momentum(
    outer: Outer, tmp_path: Path
) -> None:
    local = train(LocalSGD(2, outer=outer), tmp_path / "local", ranks=1)
    single = train(parse("Single()", STRATEGIES, where="here"), tmp_path / "single", ranks=1)
    assert final(local.final).tobytes() == final(single.final).tobytes()


def slowly(buffers: str, every: int, slowly_every: int, samples: int) -> Vector:
    """SlowMo over local SGD with momentum 0.9, whose buffers are h."""
    x, h = [start()] * RANKS, [np.zeros_like(start())] * RANKS
    begun, velocity = start(), np.zeros_like(start())
    for step, parts in enumerate(mean_samples(RANKS, BATCH, samples), start=1):
        h = [0.9 * own + x[k] - parts[k][0] for k, own in enumerate(h)]
        x = [replica - RATE * own for replica, own in zip(x, h, strict=True)]
        if step % every == 0:
            x = [np.mean(x, axis=0)] * RANKS
        if step % slowly_every == 0:
            velocity = 0.4 * velocity + (begun - x[0]) / RATE
            begun = begun - 0.8 * RATE * velocity
            x = [begun] * RANKS
            if buffers == "average":
                h = [np.mean(h, axis=0)] * RANKS
            elif buffers == "reset":
                h = [np.zeros_like(begun)] * RANKS
    result: Vector = np.mean(x, axis=0)
    return result


@pytest.mark.parametrize("buffers", ["maintain", "reset", "average"])
@pytest.mark.parametrize(("every", "slowly_every"), [(2, 6), (3, 3)])
def test_slow_updates_have_a_period_and_treat_buffers(
    buffers: Any, every: int, slowly_every: int, tmp_path: Path
) -> None:
    outer = SlowMo(0.4, rate=0.8, every=slowly_every, buffers=buffers)
    options: dict[str, Any] = {"optimizer": f"SGD(lr={RATE}, momentum=0.9)", "samples": 240}
    trained = train(LocalSGD(every, outer=outer), tmp_path, **options)
    expected = slowly(buffers, every, slowly_every, 240)
    np.testing.assert_allclose(final(trained.final), expected, rtol=1e-12)


def streamed(every: int, overlap: int, mix: float | None) -> Vector:
    """Two fragments, the second half a round behind; averages arrive `overlap` steps late.

    Without `mix` what was learnt meanwhile is added to them.
    """
    x = [start() for _ in range(RANKS)]
    cuts = [slice(0, 3), slice(3, 5)]
    offsets = [every // 2, 0]  # the layout ends with the parameter that was made first
    begun = start()
    flying: dict[int, tuple[int, Vector, list[Vector]]] = {}
    samples = np.zeros((2, RANKS))

    def arrive(index: int) -> None:
        _, average, sent = flying.pop(index)
        cut = cuts[index]
        delta = begun[cut] - average
        begun[cut] = begun[cut] - 0.5 * delta
        for replica, before in zip(x, sent, strict=True):
            if mix is None:
                replica[cut] = begun[cut] + replica[cut] - before
            else:
                replica[cut] = mix * replica[cut] + (1 - mix) * begun[cut]

    for step, parts in enumerate(mean_samples(RANKS, BATCH, SAMPLES), start=1):
        for rank, (mean, count) in enumerate(parts):
            if count:
                x[rank] = x[rank] - RATE * (x[rank] - mean)
            samples[:, rank] += count
        for index in [index for index in flying if flying[index][0] <= step]:
            arrive(index)
        for index in range(2):
            if (step + offsets[index]) % every == 0:
                weights = samples[index] / samples[index].sum()
                parts_of = [replica[cuts[index]].copy() for replica in x]
                average = sum(w * part for w, part in zip(weights, parts_of, strict=True))
                flying[index] = (step + overlap, average, parts_of)
                samples[index] = 0
    for index in list(flying):
        arrive(index)
    ends = [
        averaged([replica[cut] for replica in x], n) for cut, n in zip(cuts, samples, strict=True)
    ]
    return np.concatenate(ends)


@pytest.mark.parametrize(
    ("every", "overlap", "mix"), [(2, 1, 0.5), (4, 1, 0.25), (4, 2, 0.0), (4, 2, None)]
)
def test_streaming_averages_one_fragment_at_a_time_and_late(
    every: int, overlap: int, mix: float | None, tmp_path: Path
) -> None:
    late: dict[str, Any] = {"late": "added"} if mix is None else {"mix": mix}
    strategy = LocalSGD(every, outer=Nesterov(0.5, 0.0), fragments=2, overlap=overlap, **late)
    trained = train(strategy, tmp_path)
    np.testing.assert_allclose(final(trained.final), streamed(every, overlap, mix), rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 2, "fragments": 3}, "leave some step with several"),
        ({"every": 4, "fragments": 2, "overlap": 3}, "longer than the 2 steps"),
        ({"every": None, "overlap": 1}, "need rounds of steps"),
        ({"every": 4, "late": "added"}, "needs averages that are late"),
        ({"every": 4, "overlap": 1, "outer": Elastic()}, "does not go with Elastic"),
        ({"every": 4, "every_epochs": 1}, "both set"),
        ({"every": 4, "outer": SlowMo(every=6)}, "every=6.* is no multiple .* divisor of 6"),
        ({"every": None, "outer": SlowMo(every=6)}, "is no multiple"),
        ({"every": 4, "fragments": 2, "outer": SlowMo(buffers="reset")}, "leave out fragments"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LocalSGD(**settings)
