"""Aggregation of a buffer's uploads into the mean that the server steps with: plain, private, or secure."""
