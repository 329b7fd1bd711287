"""Runs as one page: what they learned, when, at what cost, and for whom."""
