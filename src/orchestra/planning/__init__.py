"""Which strategy for a model on a cluster, and what it gains: candidates, search, answer."""
