"""When to exchange, and what: one file per algorithm."""
