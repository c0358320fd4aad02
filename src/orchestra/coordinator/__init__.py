"""Decides what each worker does next, where workers need not step together. Pure: no messages."""
