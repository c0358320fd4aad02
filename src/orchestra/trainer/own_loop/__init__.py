"""Loops of the user's own: their backward passes and steps train on all workers.

A loop (`loop.py`) has a rank, the state of a strategy on it, a dealer of the user's loader, and the
epochs over what that deals out. `Batches` is what the user holds of it.
"""

from orchestra.trainer.own_loop.batches import Batches
from orchestra.trainer.own_loop.loop import OwnLoop

__all__ = ["Batches", "OwnLoop"]
