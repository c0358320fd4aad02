"""The race of a plan against an oracle that knows every candidate."""
