"""The worker: the one object that a strategy's member sees, on any engine."""
