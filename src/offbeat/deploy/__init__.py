"""Training over real sites: the same algorithms and the same loop, with Flower to carry messages."""
