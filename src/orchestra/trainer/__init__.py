"""The program of every rank: its loop, checkpoints, and loops of the user's own."""
