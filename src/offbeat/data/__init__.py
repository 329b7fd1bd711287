"""Data sets, their partition over clients, minibatches, and what clients store between visits."""
