"""Every rank in one process, in virtual time: deterministic, on a cluster that is described."""
