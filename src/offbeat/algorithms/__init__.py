"""One paper, one file; and the catalogue that names them all."""

from offbeat.algorithms.catalogue import CATALOGUE, build, find
from offbeat.algorithms.entry import Method, Setting

__all__ = ["CATALOGUE", "Method", "Setting", "build", "find"]
