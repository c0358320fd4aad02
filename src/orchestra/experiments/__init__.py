"""Experiment files, and the folders that their runs leave."""
