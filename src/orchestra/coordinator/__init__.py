"""Decisions on what each rank does next: take samples, rest, or finish. Pure: no messages."""
