"""Reproductions and studies, run from a checkout: `python -m experiments NAME`."""
