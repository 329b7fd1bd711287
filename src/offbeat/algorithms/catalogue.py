"""The catalogue: name to method."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from offbeat.algorithms import makers
from offbeat.algorithms.ca2fl import CA2FL
from offbeat.algorithms.dude import DuDe
from offbeat.algorithms.entry import Method, Setting
from offbeat.algorithms.fafed import FAFED
from offbeat.algorithms.fedasync import FedAsync
from offbeat.algorithms.fedcm import FedCM, FedCMVR
from offbeat.algorithms.fedsps import FedSPS
from offbeat.algorithms.masfl import MasFL
from offbeat.algorithms.mime import Mime, MimeLite
from offbeat.algorithms.momentum_methods import MOMENTUM_METHODS
from offbeat.algorithms.scaffold import Scaffold
from offbeat.algorithms.scaffold_m_vr import ScaffoldMVR
from offbeat.core import AnyAlgorithm
from offbeat.errors import unknown_name

CATALOGUE: Mapping[str, Method] = MappingProxyType(
    {
        "adamasfl": Method(
            makers.adamasfl,
            "momentum, control variates and unit steps; rates from S, K, T",
            "ICML 2025, PMLR 267:70410",
            "asynchronous",
            theory="local 1/(K sqrt T), server (SK)^(1/4) / T^(3/4), beta sqrt(SK/T), at most 1",
        ),
        "ca2fl": Method(
            makers.plain(CA2FL, local_lr=0.1),
            "each client's last update calibrates the mean",
            "ICLR 2024",
            "asynchronous",
            theory="CA2FL.tuned: local <= 1/(36 K L sqrt(tau)), local x server <= S/(36 K L^2 tau^2)",
        ),
        "cadence": Method(
            makers.cadence,
            "unit steps in a unit found on the way; rates from K and the staleness seen",
            "this project",
            "asynchronous",
            theory="none: local 0.12/sqrt(K), server 0.48 sqrt(K) while a client is at work, both by trying",
            # noise on two vectors drowns both, and hides whether steps agree
            private=(("noisy", True),),
            bare=(("variates", False),),
        ),
        "defedavg": Method(
            makers.fedavg,
            "FedAvg where clients queue what they are sent",
            "arXiv 2402.11198",
            "queues",
            theory="local <= 1/(4 sqrt(3) K L), local x server <= 1/(4 K L tau)",
        ),
        "defedavg-iid": Method(
            makers.fedavg,
            "the same, the new model going back to those who reported",
            "arXiv 2402.11198",
            "rounds",
            theory="local x server <= 1/(4 K L tau)",
        ),
        "dude": Method(
            makers.plain(DuDe, local_lr=0.05, server_lr=0.1),
            "the mean of everybody's latest gradient",
            "arXiv 2405.16966",
            "rounds",
        ),
        "fadas": Method(
            makers.fadas,
            "AMSGrad on the server of a buffer",
            "ICML 2024, arXiv 2407.18365",
            "asynchronous",
            theory="server of the order of sqrt(S)",
        ),
        "fadas-da": Method(
            makers.fadas_da,
            "FADAS, its rate lowered for stale buffers",
            "ICML 2024, arXiv 2407.18365",
            "asynchronous",
            theory="server of the order of sqrt(S) / tau_c, tau_c the median staleness",
        ),
        "fafed": Method(
            makers.plain(FAFED, ("starting",), local_lr=0.01, alpha=0.1),
            "adaptive local steps along recursive momentum",
            "AAAI 2023",
            "synchronous",
            theory="local falls as N^(2/3) / (L t^(1/3)), alpha as its square",
        ),
        "fedadagrad": Method(
            makers.fedadagrad, "Adagrad on the server", "ICLR 2021, arXiv 2003.00295", "synchronous"
        ),
        "fedadam": Method(makers.fedadam, "Adam on the server", "ICLR 2021, arXiv 2003.00295", "synchronous"),
        "fedams": Method(
            makers.fedams, "AMSGrad with a floor on the server", "ICML 2022, arXiv 2205.02719", "synchronous"
        ),
        "fedasync": Method(
            makers.plain(FedAsync, local_lr=0.1),
            "mixes each arriving model",
            "arXiv 1903.03934",
            "asynchronous",
            weights="polynomial:0.5",
            buffer=1,
        ),
        "fedavg": Method(
            makers.fedavg,
            "local SGD, the mean of the updates",
            "AISTATS 2017, arXiv 1602.05629",
            "synchronous",
        ),
        "fedavg-m": Method(
            makers.plain(FedCM, local_lr=0.1, server_lr=1.0, beta=0.1),
            "momentum inside local steps (FedCM)",
            "ICLR 2024; arXiv 2106.10874",
            "synchronous",
        ),
        "fedavg-m-vr": Method(
            makers.plain(FedCMVR, local_lr=0.1, server_lr=1.0, beta=0.1),
            "the same with variance reduction",
            "ICLR 2024",
            "synchronous",
        ),
        "fedavgm": Method(
            makers.fedavgm, "FedAvg with momentum on the server", "arXiv 1909.06335", "synchronous"
        ),
        "fedbuff": Method(
            makers.fedavg,
            "the mean of a buffer, stale updates fading",
            "AISTATS 2022, arXiv 2106.06639",
            "asynchronous",
            weights="polynomial:0.5",
            theory="local x server <= 1/(4 K tau^(3/2))",
        ),
        "fedsps": Method(
            makers.plain(FedSPS),
            "local steps as long as the loss allows",
            "arXiv 2307.06306",
            "synchronous",
            theory="FedSPS.tuned: bound <= min(1/(2 c L), 1/(25 K L))",
        ),
        "fedyogi": Method(makers.fedyogi, "Yogi on the server", "ICLR 2021, arXiv 2003.00295", "synchronous"),
        "masfl": Method(
            makers.masfl,
            "momentum and control variates under delay",
            "ICML 2025, PMLR 267:70410",
            "asynchronous",
            theory="MasFL.tuned: beta sqrt(SK/T), server beta/(4 L), local from L and the worst staleness",
        ),
        "mime": Method(
            makers.plain(Mime, local_lr=0.1),
            "frozen server momentum and corrected local steps, two trips a round",
            "arXiv 2008.03606",
            "phases",
            theory="local sqrt(S D / (L G T K^2)), G = sigma_h^2 + sigma^2/K",
        ),
        "mimelite": Method(
            makers.plain(MimeLite, local_lr=0.1),
            "frozen server momentum inside local steps",
            "arXiv 2008.03606",
            "synchronous",
        ),
        "padamfed": Method(
            makers.adamasfl,
            "AdaMasFL in synchronous rounds",
            "ICLR 2025",
            "synchronous",
            theory="as adamasfl",
        ),
        "padamfed-vr": Method(
            makers.padamfed_vr,
            "PAdaMFed with variance reduction; rates from S, K, T",
            "ICLR 2025",
            "synchronous",
            theory="local 1/(K T), server and beta (SK)^(1/3) / T^(2/3), beta at most 1",
        ),
        "scaffold": Method(
            makers.plain(Scaffold, local_lr=0.1),
            "control variates for local SGD",
            "ICML 2020, arXiv 1910.06378",
            "synchronous",
            theory="Scaffold.tuned: server sqrt(S), local <= (S/N)^(2/3) / (24 K L server)",
        ),
        "scaffold-m": Method(
            makers.plain(MasFL, local_lr=0.05, server_lr=0.1, beta=0.3, start=0.0),
            "control variates and client-side momentum",
            "ICLR 2024",
            "synchronous",
            theory="server of the order of beta/L",
        ),
        "scaffold-m-vr": Method(
            makers.plain(ScaffoldMVR, ("momentum",), local_lr=0.05, server_lr=0.1, beta=0.3),
            "SCAFFOLD-M with variance reduction",
            "ICLR 2024",
            "synchronous",
        ),
        **MOMENTUM_METHODS,
    }
)


def find(name: str) -> Method:
    """The entry of that name."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise unknown_name("algorithm", name, CATALOGUE) from None


def build(name: str, setting: Setting, given: Mapping[str, Any]) -> AnyAlgorithm:
    """A method by name, with some hyperparameters given."""
    entry = find(name)
    for key in given:
        if key not in entry.parameters():
            raise unknown_name(f"parameter of {name}", key, entry.parameters())
    return entry.build(setting, **given)
