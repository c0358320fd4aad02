"""When to exchange, and what: one file an algorithm."""
