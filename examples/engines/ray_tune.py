"""The candidates of an experiment as trials of Ray Tune: each trial is a training of its own.

    python examples/engines/ray_tune.py

A trial trains on processes of its own on its node; Tune decides how many trials run at a time.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ray import tune

import orchestra


def trial(candidate: dict[str, Any]) -> dict[str, float]:
    """Train one candidate; what it returns is Tune's result of the trial."""
    strategy, rate = candidate["strategy"], candidate["lr"]
    record = orchestra.train(
        "digits", strategy, ranks=candidate["ranks"], epochs=3, optimizer=f"SGD(lr={rate})",
        out=Path(tune.get_context().get_trial_dir(), "record"),
    )  # fmt: skip
    return {"accuracy": record.learned.metrics["accuracy"], "train_seconds": record.time.training}


def main() -> None:
    """Try all candidates, and print the best one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--storage", default=None, help="a folder that all nodes share")
    options = parser.parse_args()
    candidates = {
        "strategy": tune.grid_search(["AllReduce('ring')", "LocalSGD(every=4)"]),
        "lr": tune.grid_search([0.01, 0.1]),
        "ranks": options.ranks,
    }
    tuner = tune.Tuner(
        # A trial takes as many cores as it has ranks, as far as this machine has them.
        tune.with_resources(trial, {"cpu": min(options.ranks, os.cpu_count() or 1)}),
        param_space=candidates,
        tune_config=tune.TuneConfig(metric="accuracy", mode="max"),
        run_config=tune.RunConfig(name="digits", storage_path=options.storage),
    )
    best = tuner.fit().get_best_result()
    print(f"best: {best.config['strategy']}, lr {best.config['lr']}", end=", ")
    print(f"accuracy {best.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
