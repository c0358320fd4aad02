"""What a run leaves: reports of ranks, records of runs, the summary, the environment."""
