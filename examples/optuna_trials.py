"""Trials of Optuna over strategies and learning rates; trials that do worse are pruned.

    pip install -c constraints.txt '.[optuna]'
    python optuna_trials.py --trials 12

A trial is a training on processes of its own. Its callback reports the loss at each tenth of the
budget, and stops the run in good order when Optuna prunes the trial.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import optuna

import orchestra

STRATEGIES = ("AllReduce('ring')", "LocalSGD(every=4)")
TENTHS = 10


def objective(trial: optuna.Trial, ranks: int, epochs: int, folder: Path) -> float:
    """Train with the settings that Optuna suggests, and return the loss on the test data."""
    strategy = trial.suggest_categorical("strategy", STRATEGIES)
    rate = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    reported = 0

    def callback(progress: orchestra.RunProgress) -> bool:
        """Report the loss of the tenths that are over; pruners compare trials at equal steps."""
        nonlocal reported
        while reported < int(TENTHS * progress.fraction):
            reported += 1
            trial.report(progress.loss, step=reported)
            if trial.should_prune():
                return True
        return False

    record = orchestra.train(
        "digits", strategy, ranks=ranks, epochs=epochs, optimizer=f"SGD(lr={rate})", quiet=True,
        out=folder / f"trial-{trial.number}", callback=callback,
    )  # fmt: skip
    trial.set_user_attr("folder", str(record.folder))
    if record.ending.stopped_by == "callback":
        raise optuna.TrialPruned
    assert record.learned.loss is not None
    return record.learned.loss


def main() -> None:
    """Make the trials one after the other, and print the best one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/optuna"), help="a new one")
    options = parser.parse_args()
    study = optuna.create_study(
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2),
    )
    given = options.ranks, options.epochs, options.folder
    study.optimize(lambda trial: objective(trial, *given), n_trials=options.trials)
    for trial in study.trials:
        print(f"trial {trial.number}: {trial.state.name.lower()}, {trial.params}")
    print(
        f"best: trial {study.best_trial.number}, {study.best_params}, loss {study.best_value:.3f}"
    )


if __name__ == "__main__":
    main()
