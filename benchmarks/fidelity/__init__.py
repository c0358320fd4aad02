"""How well a simulation predicts real runs: `python -m benchmarks.fidelity --help`."""
