"""One page from the records of runs: which strategy won, why, and whether distributing paid."""
