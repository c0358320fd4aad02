"""A local web page that shows how long a step of each strategy takes on a simulated cluster."""
