"""PAdaMFed (ICLR 2025, Algorithm 1) and PAdaMFed-VR: AdaMasFL's synchronous elder, and its STORM form.

Indices are the paper's: round t has c^{t-1} and g^{t-1} at hand and makes c^t, g^t and theta^{t+1}.
The paper has rounds; a late task works with what its version's round had. Algorithm 2 itself was not
at hand: the momentum of VR is derived, such that g^t stays the mean of the local directions, for
which clients also upload their mean gradient at theta^{t-1}. theta^{-1} is theta^0.
"""

from typing import Any

import numpy as np

from oracles.adamasfl import Rates
from oracles.cases import SYSTEM, Case
from oracles.replay import Run, Vector
from oracles.variates import State


def padamfed_theory(cohort: int, local_steps: int, rounds: int) -> Rates:
    """Theorem 1; beta is kept at 1 where SK > T."""
    S, K, T = cohort, local_steps, rounds
    return Rates(1 / (K * T**0.5), (S * K) ** 0.25 / T**0.75, min(1.0, (S * K / T) ** 0.5))


def padamfed_vr_theory(cohort: int, local_steps: int, rounds: int) -> Rates:
    """Theorem 2; beta is kept at 1 where SK > T^2."""
    S, K, T = cohort, local_steps, rounds
    gamma = (S * K) ** (1 / 3) / T ** (2 / 3)
    return Rates(1 / (K * T), gamma, min(1.0, gamma))


def padamfed(run: Run, *, local_lr: float, server_lr: float, beta: float, vr: bool = False) -> list[Vector]:
    """The models alone."""
    states = padamfed_states(run, local_lr, server_lr, beta, vr)
    return [state.x for state in states]


def padamfed_vr(run: Run, **known: Any) -> list[Vector]:
    """The models alone, with variance reduction."""
    return padamfed(run, vr=True, **known)


def padamfed_states(run: Run, eta: float, gamma: float, beta: float, vr: bool = False) -> list[State]:
    """theta^t with the c^{t-1}, g^{t-1} and c_i^{t-1} that round t has at hand, for t = 0 to T."""
    problem, population, x0, steps = run
    N = population
    first = np.array(x0, dtype=np.float64)
    own = []  # c_i, always the latest
    for i in range(N):
        seen = [problem.gradient(i, 0, k, first) for k in range(problem.steps(i, 0))]
        own.append(np.mean(seen, axis=0))
    theta = {-1: first, 0: first}
    c = {-1: np.mean(own, axis=0)}
    g = {-1: c[-1]}
    states = [State(theta[0], c[-1], g[-1], list(own), [], [])]
    for t, step in enumerate(steps):
        S = len(step)
        moved, new, old, at_last, raised = [], [], [], [], []
        for i, v, visit in step:
            K = problem.steps(i, visit)
            here = theta[v]
            seen, before, directions = [], [], []
            for k in range(K):
                seen.append(problem.gradient(i, visit, k, here))
                if vr:
                    before.append(problem.gradient(i, visit, k, theta[v - 1]))
                    direction = seen[-1] + beta * (c[v - 1] - own[i]) + (1 - beta) * (g[v - 1] - before[-1])
                else:
                    direction = beta * (seen[-1] - own[i] + c[v - 1]) + (1 - beta) * g[v - 1]
                directions.append(direction)
                here = here - eta * direction / max(np.sqrt(direction @ direction), 1e-12)
            moved.append((theta[v] - here) / (eta * K))
            old.append(own[i])
            own[i] = np.mean(seen, axis=0)
            new.append(own[i])
            raised.append(np.mean(directions, axis=0))
            at_last.append(np.mean(before, axis=0) if vr else 0 * first)
        theta[t + 1] = theta[t] - gamma * sum(moved, 0 * first) / S
        c[t] = c[t - 1] + (sum(new, 0 * first) - sum(old, 0 * first)) / N
        if vr:
            g[t] = (
                np.mean(new, axis=0)
                + beta * (c[t - 1] - np.mean(old, axis=0))
                + (1 - beta) * (g[t - 1] - np.mean(at_last, axis=0))
            )
        else:
            g[t] = beta * (np.mean(new, axis=0) - np.mean(old, axis=0) + c[t - 1]) + (1 - beta) * g[t - 1]
        states.append(State(theta[t + 1], c[t], g[t], list(own), new, raised))
    return states


CASES = {
    "padamfed": Case("padamfed", {}, padamfed, padamfed_theory(*SYSTEM)._asdict(), prompt=True),
    "padamfed-vr": Case("padamfed-vr", {}, padamfed_vr, padamfed_vr_theory(*SYSTEM)._asdict()),
}
