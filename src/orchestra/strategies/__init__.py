"""When to exchange, and what: one short file an algorithm."""
