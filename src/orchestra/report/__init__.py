"""From the records of runs to one page that answers: which strategy, why, and was it worth it."""
