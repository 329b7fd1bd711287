"""Data sets, their partition over clients, minibatches, and what clients store between visits."""

from offbeat.data.datasets import Source, load
from offbeat.data.partition import Dirichlet, Iid, Natural, Partition, Quantity, Shards, parse_partition
from offbeat.data.population import Epochs, Examples, Population, Steps

__all__ = [
    "Dirichlet",
    "Epochs",
    "Examples",
    "Iid",
    "Natural",
    "Partition",
    "Population",
    "Quantity",
    "Shards",
    "Source",
    "Steps",
    "load",
    "parse_partition",
]
