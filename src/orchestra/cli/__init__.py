"""The command `orchestra`: parse, call, print."""
