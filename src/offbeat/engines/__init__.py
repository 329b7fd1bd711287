"""Engines that compute the clients' local work: in one process, in worker processes, on a Ray cluster."""
