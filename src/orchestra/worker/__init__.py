"""The one object that a strategy sees."""
