"""Runs on several hosts by ssh: what each host has, and ranks there until the run is over."""
