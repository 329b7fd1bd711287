"""Who the clients are: data sets, partitions, minibatches, memory."""

from offbeat.population.batches import Epochs, Steps
from offbeat.population.partition import Dirichlet, Iid, Natural, Partition, Quantity, Shards, parse_partition
from offbeat.population.population import Examples, Population
from offbeat.population.sources import Source, load

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
