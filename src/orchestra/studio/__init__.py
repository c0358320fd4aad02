"""A local web page on the simulation: what a step of each strategy takes on a cluster."""
