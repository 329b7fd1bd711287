"""Differential privacy and secure aggregation: clipping, noise, accounting, and sums of secret shares."""
