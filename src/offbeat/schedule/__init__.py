"""The schedule of a run, without tensors: which clients are given tasks, and when updates arrive."""
