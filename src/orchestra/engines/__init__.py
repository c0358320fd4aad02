"""What runs a program on many ranks: real `processes`, or a `simulation` in virtual time."""
