"""The command: predict runs, carry them out, and print how far the predictions are off."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.fidelity.cases import STRATEGIES, TASKS, cases, write_clusters
from benchmarks.fidelity.runs import bench_fidelity
from benchmarks.fidelity.verdicts import markdown
from benchmarks.options import bench_parser, listed, rank_counts, read_options, write_figures
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.errors import InputError

DESCRIPTION = """\
Calibrate with one worker and a link between two; predict the step time, bytes, staleness and final
parameters of many strategies on 2 to 4 ranks by simulating one_host with this machine's cores; then
run the same on processes, in turn, and print how far the predictions are off, beside two simpler
predictors: a closed formula with the same calibrated figures, and the step of one worker.

The machine has to be quiet: what other programs take, no prediction knows of.
"""


def main(arguments: list[str]) -> int:
    """Measure, and print the tables."""
    parser = bench_parser("python -m benchmarks.fidelity", DESCRIPTION, rounds=4)
    parser.option("--ranks", "N,...", "in place of each task's own numbers")
    parser.option("--strategies", "LABEL,...", "some of those that it prints")
    parser.option("--tasks", "NAME,...", "some of cnn, lenet and mlp")
    parser.option("--calibration", "FILE", "of orchestra calibrate; measures no more", type=Path)
    engine = "processes of this machine, or an emulation of clusters (default: processes)"
    engines = ("processes", "emulation")
    parser.option("--engine", "NAME", engine, default=engines[0], choices=engines)
    parser.option("--clusters", "FILE,...", "emulated in place of four of its own, a rank a node")
    parser.option("--markdown", "FILE", "write the tables to a file", type=Path)
    options = read_options(parser, arguments)
    ranks = rank_counts(options.ranks) if options.ranks is not None else None

    tasks = listed("--tasks", options.tasks, TASKS).values()
    if options.clusters is not None and options.engine == "processes":
        raise InputError("--clusters: they are emulated: add --engine emulation")
    strategies = listed("--strategies", options.strategies, STRATEGIES)
    with tempfile.TemporaryDirectory(prefix="orchestra-clusters-") as folder:
        clusters: list[Path | None] = [None]
        if options.clusters is not None:
            clusters = [Path(name.strip()) for name in options.clusters.split(",")]
        elif options.engine == "emulation":
            clusters = [*write_clusters(Path(folder)).values()]
        chosen = cases(strategies, tasks, ranks, clusters)
        with progress_line() as tell:
            rows, calibration = bench_fidelity(
                chosen, options.rounds, calibration=options.calibration, on_progress=tell
            )
    text = markdown(rows, calibration)
    print(text, end="")
    if options.markdown is not None:
        options.markdown.write_text(text)
    write_figures(options.json, "fidelity", rows)
    # Ctrl-C ends the measurement, and what was measured is printed; 130 is a shell's status for it.
    if len(rows) < len(chosen):
        print(f"orchestra: stopped after {len(rows)} of {len(chosen)} rows", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
