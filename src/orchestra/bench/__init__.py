"""Benchmarks: speed as ratios to peers that take turns with Orchestra in the same run."""
