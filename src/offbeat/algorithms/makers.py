"""Constructors for the catalogue: the setting of a run, and hyperparameters as keywords with defaults."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Concatenate

from offbeat.algorithms.adamasfl import AdaMasFL
from offbeat.algorithms.cadence import Cadence
from offbeat.algorithms.entry import Setting
from offbeat.algorithms.fadas import Cap, Shrink, Trailing
from offbeat.algorithms.fadas import fadas as make_fadas
from offbeat.algorithms.fedopt import Adagrad, Adam, AmsGrad, Ema, FedOpt, HeavyBall, Yogi
from offbeat.algorithms.masfl import MasFL
from offbeat.algorithms.padamfed_vr import PAdaMFedVR
from offbeat.algorithms.ranges import cap_beta
from offbeat.core import AnyAlgorithm


def plain(
    method: Callable[..., AnyAlgorithm], hidden: tuple[str, ...] = (), **defaults: Any
) -> Callable[Concatenate[Setting, ...], AnyAlgorithm]:
    """A constructor that passes its keywords on to a method's own, with these defaults."""

    def make(setting: Setting, **given: Any) -> AnyAlgorithm:
        return method(**defaults | given)

    own = [p for name, p in inspect.signature(method).parameters.items() if name not in hidden]
    words = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=defaults.get(p.name, p.default)) for p in own
    ]
    first = inspect.Parameter("setting", inspect.Parameter.POSITIONAL_ONLY)
    make.__signature__ = inspect.Signature([first, *words])  # type: ignore[attr-defined]
    return make


def _tuned(
    tuned: Callable[..., AnyAlgorithm], setting: Setting, given: Mapping[str, float | None]
) -> AnyAlgorithm:
    """Rates as the theorem has them, but for those that were given."""
    method = tuned(*setting, beta=given["beta"])
    changed = {name: value for name, value in given.items() if value is not None}
    return replace(method, **changed)  # type: ignore[type-var]


def fedavg(setting: Setting, *, local_lr: float = 0.1, server_lr: float = 1.0) -> FedOpt:
    """See `fedavg` in the catalogue."""
    return FedOpt(local_lr, server_lr)


def fedavgm(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 1.0,
    beta: float = 0.9,
    averaged: bool = False,
) -> FedOpt:
    """See `fedavgm` in the catalogue."""
    return FedOpt(local_lr, server_lr, Ema(beta) if averaged else HeavyBall(beta))


def fedadam(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    unbiased: bool = False,
) -> FedOpt:
    """See `fedadam` in the catalogue."""
    return FedOpt(local_lr, server_lr, Ema(beta1, unbiased), Adam(beta2, eps, unbiased))


def fedyogi(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    unbiased: bool = False,
) -> FedOpt:
    """See `fedyogi` in the catalogue."""
    return FedOpt(local_lr, server_lr, Ema(beta1, unbiased), Yogi(beta2, eps, unbiased))


def fedadagrad(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.03,
    beta1: float = 0.0,
    eps: float = 1e-3,
) -> FedOpt:
    """See `fedadagrad` in the catalogue."""
    return FedOpt(local_lr, server_lr, Ema(beta1), Adagrad(eps))


def fedams(
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
    """See `fedams` in the catalogue."""
    return FedOpt(local_lr, server_lr, Ema(beta1, unbiased), AmsGrad(beta2, eps, floor, unbiased))


def fadas(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    unbiased: bool = False,
    trailing: bool = False,
) -> FedOpt | Trailing:
    """See `fadas` in the catalogue."""
    method = make_fadas(local_lr, server_lr, beta1, beta2, eps, unbiased=unbiased)
    return Trailing(method, setting.cohort) if trailing else method


def fadas_da(
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
    trailing: bool = False,
) -> FedOpt | Trailing:
    """See `fadas_da` in the catalogue."""
    damp = Cap(tau_c) if capped else Shrink(tau_c)
    method = make_fadas(local_lr, server_lr, beta1, beta2, eps, damp, unbiased)
    return Trailing(method, setting.cohort) if trailing else method


def adamasfl(
    setting: Setting,
    *,
    local_lr: float | None = None,
    server_lr: float | None = None,
    beta: float | None = None,
    lazy: bool = False,
) -> AnyAlgorithm:
    """See `adamasfl` in the catalogue."""
    given = {"local_lr": local_lr, "server_lr": server_lr, "beta": beta, "lazy": lazy}
    return _tuned(AdaMasFL.tuned, setting, given)


def cadence(setting: Setting, *, variates: bool = True, noisy: bool = False) -> Cadence:
    """See `cadence` in the catalogue."""
    return Cadence.tuned(setting.steps, variates, noisy)


def padamfed_vr(
    setting: Setting,
    *,
    local_lr: float | None = None,
    server_lr: float | None = None,
    beta: float | None = None,
    lazy: bool = False,
) -> AnyAlgorithm:
    """See `padamfed-vr` in the catalogue."""
    given = {"local_lr": local_lr, "server_lr": server_lr, "beta": beta, "lazy": lazy}
    return _tuned(PAdaMFedVR.tuned, setting, given)


def masfl(
    setting: Setting,
    *,
    local_lr: float = 0.05,
    server_lr: float = 0.1,
    beta: float | None = None,
    lazy: bool = False,
) -> MasFL:
    """See `masfl` in the catalogue."""
    if beta is None:
        beta = cap_beta("MasFL", (setting.cohort * setting.steps / setting.rounds) ** 0.5)
    return MasFL(local_lr, server_lr, beta, lazy=lazy)
