"""Speed as ratios to peers, measured in turn in one run."""
