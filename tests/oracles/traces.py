"""Traces made up by hand: without delay, with delay, and of one client alone."""

import numpy as np

from oracles.replay import Task


def prompt(population: int, rounds: int, buffer: int, first_visit: int = 0) -> list[list[Task]]:
    """A trace without delay: distinct clients, newest version."""
    rng = np.random.default_rng(3)
    visits = [first_visit] * population
    trace = []
    for t in range(rounds):
        step = []
        for client in rng.choice(population, size=buffer, replace=False).tolist():
            step.append(Task(client, t, visits[client]))
            visits[client] += 1
        trace.append(step)
    return trace


def late(population: int, rounds: int, buffer: int, first_visit: int = 0) -> list[list[Task]]:
    """A trace with delay in which a client may come twice in a step, but never works on two tasks at once."""
    rng = np.random.default_rng(4)
    visits = [first_visit] * population
    idle_since = [0] * population
    trace = []
    for t in range(rounds):
        step = []
        for client in rng.choice(population, size=buffer).tolist():
            step.append(Task(client, int(rng.integers(idle_since[client], t + 1)), visits[client]))
            visits[client] += 1
            idle_since[client] = t
        trace.append(step)
    return trace


def alone(rounds: int) -> list[list[Task]]:
    """One client, no delay."""
    return [[Task(0, t, t)] for t in range(rounds)]
