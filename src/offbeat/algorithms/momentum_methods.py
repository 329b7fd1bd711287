"""The methods of arXiv 2402.09247 for the catalogue, with the hyperparameters of its section B.1."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from offbeat.algorithms.entry import Method, Setting
from offbeat.algorithms.fedopt import Adagrad, Adam, AmsGrad, Ema, FedOpt, Identity
from offbeat.algorithms.momentum_approximation import Approximation, LightApproximation, Ridge, Truncated
from offbeat.algorithms.weight_prediction import Foreseen, MeanDrift, Remembered, WeightPrediction
from offbeat.errors import unknown_name


def ma_fedavgm(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 1.0,
    beta: float = 0.9,
    penalty: float = 1e-4,
    rcond: float | None = None,
    window: int = 80,
    span: int = 21,
) -> FedOpt:
    """See `ma-fedavgm` in the catalogue."""
    return FedOpt(local_lr, server_lr, _approximation(beta, span, window, penalty, rcond))


def ma_fedadam(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.01,
    beta: float = 0.9,
    beta2: float = 0.99,
    eps: float = 0.01,
    penalty: float = 1e-4,
    rcond: float | None = None,
    window: int = 80,
    span: int = 21,
) -> FedOpt:
    """See `ma-fedadam` in the catalogue."""
    return FedOpt(local_lr, server_lr, _approximation(beta, span, window, penalty, rcond), Adam(beta2, eps))


def ma_fedadagrad(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.03,
    beta: float = 0.9,
    eps: float = 0.01,
    penalty: float = 1e-4,
    rcond: float | None = None,
    window: int = 80,
    span: int = 21,
) -> FedOpt:
    """See `ma-fedadagrad` in the catalogue."""
    return FedOpt(local_lr, server_lr, _approximation(beta, span, window, penalty, rcond), Adagrad(eps))


def ma_fadas(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 1e-3,
    beta: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    penalty: float = 1e-4,
    rcond: float | None = None,
    window: int = 80,
    span: int = 21,
) -> FedOpt:
    """See `ma-fadas` in the catalogue."""
    return FedOpt(
        local_lr, server_lr, _approximation(beta, span, window, penalty, rcond), AmsGrad(beta2, eps)
    )


def ma_light_fedavgm(
    setting: Setting, *, local_lr: float = 0.1, server_lr: float = 1.0, beta: float = 0.9, span: int = 21
) -> FedOpt:
    """See `ma-light-fedavgm` in the catalogue."""
    return FedOpt(local_lr, server_lr, LightApproximation(beta, span))


def ma_light_fedadam(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.01,
    beta: float = 0.9,
    beta2: float = 0.99,
    eps: float = 0.01,
    span: int = 21,
) -> FedOpt:
    """See `ma-light-fedadam` in the catalogue."""
    return FedOpt(local_lr, server_lr, LightApproximation(beta, span), Adam(beta2, eps))


def ma_light_fedadagrad(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.03,
    beta: float = 0.9,
    eps: float = 0.01,
    span: int = 21,
) -> FedOpt:
    """See `ma-light-fedadagrad` in the catalogue."""
    return FedOpt(local_lr, server_lr, LightApproximation(beta, span), Adagrad(eps))


def ma_light_fadas(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 1e-3,
    beta: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    span: int = 21,
) -> FedOpt:
    """See `ma-light-fadas` in the catalogue."""
    return FedOpt(local_lr, server_lr, LightApproximation(beta, span), AmsGrad(beta2, eps))


def weight_prediction(
    setting: Setting,
    *,
    rule: str = "fedavgm",
    local_lr: float = 0.1,
    server_lr: float = 0.1,
    beta: float = 0.9,
    beta2: float = 0.99,
    eps: float = 0.01,
    alpha: float = 0.9,
    remembered: bool = False,
) -> WeightPrediction:
    """See `weight-prediction` in the catalogue; this rate is in the paper's range for either rule."""
    if rule not in ("fedavgm", "fedadam"):
        raise unknown_name("rule of weight-prediction", rule, ("fedavgm", "fedadam"))
    scale = Adam(beta2, eps) if rule == "fedadam" else Identity()
    inner = FedOpt(local_lr, server_lr, Ema(beta), scale)
    return WeightPrediction(inner, MeanDrift(alpha), Remembered() if remembered else Foreseen())


def _approximation(beta: float, span: int, window: int, penalty: float, rcond: float | None) -> Approximation:
    return Approximation(beta, span, window, Ridge(penalty) if rcond is None else Truncated(rcond))


_entry = partial(Method, paper="arXiv 2402.09247", dispatch="poisson", limit=20)

MOMENTUM_METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "ma-fedavgm": _entry(ma_fedavgm, "FedAvgM, its momentum cleared of staleness"),
        "ma-fedadam": _entry(ma_fedadam, "FedAdam, its momentum cleared of staleness"),
        "ma-fedadagrad": _entry(ma_fedadagrad, "FedAdagrad, with momentum cleared of staleness"),
        "ma-fadas": _entry(ma_fadas, "FADAS, its momentum cleared of staleness"),
        "ma-light-fedavgm": _entry(ma_light_fedavgm, "as ma-fedavgm, without a history of updates"),
        "ma-light-fedadam": _entry(ma_light_fedadam, "as ma-fedadam, without a history of updates"),
        "ma-light-fedadagrad": _entry(ma_light_fedadagrad, "as ma-fedadagrad, without a history of updates"),
        "ma-light-fadas": _entry(ma_light_fadas, "as ma-fadas, without a history of updates"),
        "weight-prediction": _entry(
            weight_prediction, "clients start where the server will be; over FedAvgM or FedAdam"
        ),
    }
)
