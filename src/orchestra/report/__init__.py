"""Report on runs: one page, made from their records, that says which strategy won, why, and
whether distributing paid.
"""
