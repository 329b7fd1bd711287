"""FADAS (Wang et al., ICML 2024, arXiv 2407.18365): AMSGrad on the server, damped by delay.

Algorithm 1 with eq. 3 is `FedOpt` with an exponential average and AMSGrad. The delay-adaptive
form lowers the rate of a step whose stalest update is older than a threshold: `Shrink` is
eq. 77, which the paper's experiments use; `Cap` is eq. 4, which its theory uses and which
changes nothing while lr < 1 / staleness. The authors' code also corrects the moments for their
start at zero, which eq. 3 does not: `unbiased=True` gives that. What else their scripts do with
updates is in `fadas_scripts.py`.
"""

from dataclasses import dataclass

from offbeat.algorithms.fedopt import AmsGrad, Ema, FedOpt, Steady
from offbeat.algorithms.ranges import check
from offbeat.core import Cohort


@dataclass(frozen=True)
class Shrink:
    """lr / staleness above the threshold (eq. 77)."""

    threshold: float

    def __post_init__(self) -> None:
        check(self)

    def __call__(self, lr: float, cohort: Cohort) -> float:
        worst = max(cohort.staleness)
        return lr if worst <= self.threshold else min(lr, lr / worst)


@dataclass(frozen=True)
class Cap:
    """At most 1 / staleness above the threshold (eq. 4)."""

    threshold: float

    def __post_init__(self) -> None:
        check(self)

    def __call__(self, lr: float, cohort: Cohort) -> float:
        worst = max(cohort.staleness)
        return lr if worst <= self.threshold else min(lr, 1 / worst)


def fadas(
    local_lr: float,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    damp: Shrink | Cap | Steady = Steady(),
    unbiased: bool = False,
) -> FedOpt:
    """FADAS; with a `damp`, its delay-adaptive form."""
    return FedOpt(local_lr, server_lr, Ema(beta1, unbiased), AmsGrad(beta2, eps, unbiased=unbiased), damp)
