"""What a server asks of every site of a run: the plan in a task's note, read with no trust in it."""

from typing import Any, NamedTuple

from offbeat.algorithms import Setting, build
from offbeat.core import AnyAlgorithm
from offbeat.deploy import tame
from offbeat.deploy.rejections import Reason, Rejected
from offbeat.errors import InputError
from offbeat.population.batches import Epochs, Steps
from offbeat.precision import Precision

_NAMES = {"algorithm", "parameters", "setting", "work", "weight_decay", "precision", "seed", "clients"}
_PRIVATE = {"bounds", "moving"}  # of private sums in secret, where a client's upload is made ready for one
_FROZEN = {"frozen"}  # where some weights are not trained
_MOST = 2**31


class Assignment(NamedTuple):
    """The method, the local work, and the numbers that draws are keyed by."""

    algorithm: AnyAlgorithm
    work: Steps | Epochs
    weight_decay: float
    precision: Precision
    seed: int
    clients: int
    frozen: str | None = None  # what tells the server's weights that are not trained from others


def read(plan: dict[str, Any]) -> Assignment:
    """The assignment that a plan holds; nothing in it names code but the catalogue's methods."""
    for name in sorted(_NAMES - plan.keys()):
        raise Rejected(Reason.MALFORMED, f"the server's plan has no {name}.")
    for name in sorted(plan.keys() - _NAMES - _PRIVATE - _FROZEN):
        raise InputError(
            f"the server's plan has '{name[:40]}', which this site does not know: "
            "install the same version of offbeat on both."
        )
    setting = Setting(*_numbers("setting", plan["setting"], 3))
    algorithm = build(
        tame.words("algorithm", plan["algorithm"], 100),
        setting,
        tame.record("parameters", plan["parameters"], _MOST),
    )
    weight_decay = plan["weight_decay"]
    if type(weight_decay) not in (int, float):
        raise tame.malformed("weight_decay", "a number", weight_decay)
    return Assignment(
        algorithm,
        _work(plan["work"]),
        float(weight_decay),
        _precision(plan["precision"]),
        tame.whole("seed", plan["seed"], -(2**63), 2**63),
        tame.whole("clients", plan["clients"], 1, _MOST),
        tame.words("frozen", plan["frozen"], 64) if "frozen" in plan else None,
    )


def _work(value: Any) -> Steps | Epochs:
    kind = value[0] if type(value) is list and len(value) == 3 else None
    count, size = _numbers("work", value[1:] if kind else value, 2)
    match kind:
        case "steps":
            return Steps(count, size)
        case "epochs":
            return Epochs(count, size)
        case _:
            raise tame.malformed("work", "a number of steps or of epochs, and a batch size", value)


def _precision(value: Any) -> Precision:
    if type(value) is not str or value.upper() not in Precision.__members__:
        raise tame.malformed("precision", "a known one", value)
    return Precision[value.upper()]


def _numbers(what: str, value: Any, count: int) -> list[int]:
    if type(value) is not list or len(value) != count:
        raise tame.malformed(what, f"a list of {count} numbers", value)
    return [tame.whole(what, number, 1, _MOST) for number in value]
