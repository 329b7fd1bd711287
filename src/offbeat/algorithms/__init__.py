"""The catalogue: name to constructor.

An entry's constructor takes the setting of the run, for methods whose rates follow from it, and
its hyperparameters as keywords with documented defaults.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Concatenate, NamedTuple

import torch

from offbeat import trees
from offbeat.algorithms.adamasfl import AdaMasFL
from offbeat.algorithms.fadas import Cap, Shrink, fadas
from offbeat.algorithms.fedasync import FedAsync
from offbeat.algorithms.fedopt import Adagrad, Adam, AmsGrad, Ema, FedOpt, HeavyBall, Yogi
from offbeat.core import AnyAlgorithm
from offbeat.errors import InputError, unknown


class Setting(NamedTuple):
    """What the system defines: S, K and T."""

    cohort: int  # updates per server step
    steps: int  # local steps per task
    rounds: int  # server steps


@dataclass(frozen=True)
class Entry:
    """One method of the catalogue."""

    build: Callable[Concatenate[Setting, ...], AnyAlgorithm]
    summary: str
    paper: str
    asynchronous: bool  # whether the paper's protocol is
    weights: str = "constant"  # of stale updates, unless the user says otherwise
    buffer: int | None = None  # of the paper's protocol, where it fixes one

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The hyperparameters, with defaults."""
        every = inspect.signature(self.build).parameters
        return {name: p for name, p in every.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def vectors(self) -> dict[str, int]:
        """What it sends and stores, in model-sized vectors, read off the method itself."""
        algorithm = self.build(Setting(1, 1, 1))
        x = torch.zeros(1)
        state = algorithm.init(x)
        message, memory = algorithm.broadcast(state, 0), algorithm.memory(x)
        upload = inspect.get_annotations(type(algorithm).step)["mean"]
        kept = {"down": message, "client": memory, "server": state}
        counts = {name: len(trees.leaves(tree)) for name, tree in kept.items()}
        return {"down": counts["down"], "up": len(upload._fields)} | counts


def _fedavg(setting: Setting, *, local_lr: float = 0.1, server_lr: float = 1.0) -> FedOpt:
    return FedOpt(local_lr, server_lr)


def _fedavgm(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 1.0,
    beta: float = 0.9,
    damped: bool = False,
) -> FedOpt:
    return FedOpt(local_lr, server_lr, Ema(beta) if damped else HeavyBall(beta))


def _fedadam(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    unbiased: bool = False,
) -> FedOpt:
    return FedOpt(local_lr, server_lr, Ema(beta1, unbiased), Adam(beta2, eps, unbiased))


def _fedyogi(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    unbiased: bool = False,
) -> FedOpt:
    return FedOpt(local_lr, server_lr, Ema(beta1, unbiased), Yogi(beta2, eps, unbiased))


def _fedadagrad(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.03,
    beta1: float = 0.0,
    eps: float = 1e-3,
) -> FedOpt:
    return FedOpt(local_lr, server_lr, Ema(beta1), Adagrad(eps))


def _fedams(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    floor: float = 1e-3,
    eps: float = 0.0,
    unbiased: bool = False,
) -> FedOpt:
    if floor <= 0 and eps <= 0:
        raise InputError("FedAMS needs floor or eps above 0: it would divide by zero.")
    return FedOpt(local_lr, server_lr, Ema(beta1, unbiased), AmsGrad(beta2, eps, floor, unbiased))


def _fedasync(setting: Setting, *, local_lr: float = 0.1, alpha: float = 0.6, rho: float = 0.0) -> FedAsync:
    return FedAsync(local_lr, alpha, rho)


def _fadas(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    unbiased: bool = False,
) -> FedOpt:
    return fadas(local_lr, server_lr, beta1, beta2, eps, unbiased=unbiased)


def _fadas_da(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    tau_c: float = 1.0,
    capped: bool = False,
    unbiased: bool = False,
) -> FedOpt:
    damp = Cap(tau_c) if capped else Shrink(tau_c)
    return fadas(local_lr, server_lr, beta1, beta2, eps, damp, unbiased)


def _adamasfl(
    setting: Setting,
    *,
    local_lr: float | None = None,
    server_lr: float | None = None,
    beta: float | None = None,
) -> AdaMasFL:
    given = {"local_lr": local_lr, "server_lr": server_lr, "beta": beta}
    tuned = AdaMasFL.tuned(setting.cohort, setting.steps, setting.rounds)
    return replace(tuned, **{name: value for name, value in given.items() if value is not None})


CATALOGUE: Mapping[str, Entry] = MappingProxyType(
    {
        "adamasfl": Entry(
            _adamasfl,
            "momentum, control variates and unit steps; rates from S, K, T",
            "ICML 2025, PMLR 267:70410",
            True,
        ),
        "fadas": Entry(_fadas, "AMSGrad on the server of a buffer", "ICML 2024, arXiv 2407.18365", True),
        "fadas-da": Entry(
            _fadas_da, "FADAS, its rate lowered for stale buffers", "ICML 2024, arXiv 2407.18365", True
        ),
        "fedadagrad": Entry(_fedadagrad, "Adagrad on the server", "ICLR 2021, arXiv 2003.00295", False),
        "fedadam": Entry(_fedadam, "Adam on the server", "ICLR 2021, arXiv 2003.00295", False),
        "fedams": Entry(_fedams, "AMSGrad with a floor on the server", "ICML 2022, arXiv 2205.02719", False),
        "fedasync": Entry(
            _fedasync, "mixes each arriving model", "arXiv 1903.03934", True, "polynomial:0.5", 1
        ),
        "fedavg": Entry(
            _fedavg, "local SGD, the mean of the updates", "AISTATS 2017, arXiv 1602.05629", False
        ),
        "fedavgm": Entry(_fedavgm, "FedAvg with momentum on the server", "arXiv 1909.06335", False),
        "fedbuff": Entry(
            _fedavg,
            "the mean of a buffer, stale updates fading",
            "AISTATS 2022, arXiv 2106.06639",
            True,
            "polynomial:0.5",
        ),
        "fedyogi": Entry(_fedyogi, "Yogi on the server", "ICLR 2021, arXiv 2003.00295", False),
    }
)


def find(name: str) -> Entry:
    """The entry of that name."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise unknown("algorithm", name, CATALOGUE) from None


def build(name: str, setting: Setting, given: Mapping[str, Any]) -> AnyAlgorithm:
    """A method by name, with some hyperparameters given."""
    entry = find(name)
    for key in given:
        if key not in entry.parameters():
            raise unknown(f"parameter of {name}", key, entry.parameters())
    return entry.build(setting, **given)
