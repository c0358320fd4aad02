"""Engines run the program of every rank: `processes`, `emulation` and `simulation`."""
