"""The records of a run: reports of ranks, records of runs, the summary, and the environment."""
