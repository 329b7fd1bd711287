"""The papers' pseudo-code in NumPy loops: each oracle replays a recorded trace in float64.

Nothing in here may import offbeat or torch.
"""
