"""Control variates: what server and clients hold at a version, and the start that fills it."""

from typing import NamedTuple

from oracles.replay import Problem, Vector, mean_gradient


class State(NamedTuple):
    """One version, and what the tasks that led to it did."""

    x: Vector
    c: Vector
    g: Vector
    variates: list[Vector]  # c_i of every client
    gradients: list[Vector]  # per task, mean of its raw gradients
    directions: list[Vector]  # per task, mean of its directions before any normalising


def start(problem: Problem, population: int, x: Vector) -> State:
    """c_i: the mean gradient of client i's visit 0 at x0; c and g: the mean of all c_i."""
    variates = [mean_gradient(problem, client, 0, x) for client in range(population)]
    mean = sum(variates, 0 * x) / population
    return State(x, mean, mean, variates, [], [])
