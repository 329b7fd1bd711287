"""Rules for Cadence's unit of length, tried on systems that a seeded program draws.

Who works when, and on which rows, does not depend on the method. So all rules and all rates of FedBuff run
together on one schedule, as rows of the same tensors, and differ in nothing else. The local and the server
steps are those of `offbeat.algorithms.cadence`, which `--check` compares; only the unit differs by rule, and
constants that a rule names.

`python -m experiments.tuning_free.unit_rules --data data.npz --set first --device cuda --processes 12
--out records.jsonl` runs one set of rules of `unit_sets.json` on the development draw, over all seeds;
`--rates` adds FedBuff with its grid of rates, and `--draw` takes another of the draws of `unit_tasks.py`.
`--rivals` runs other methods of the catalogue as they are by default, on the same schedules, and FADAS-da
with a grid of rates.
"""

import argparse
import heapq
import json
import math
import multiprocessing
import queue
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.tuning_free import varied
from experiments.tuning_free.bouncing import Bouncing
from experiments.tuning_free.steady import Steady
from experiments.tuning_free.unit_tasks import (
    DRAWS,
    Data,
    System,
    describe,
    label,
    losses,
    make_data,
    make_model,
    partition,
    scaled,
    scores,
)
from torch import Tensor

from offbeat.algorithms import CATALOGUE, Setting
from offbeat.algorithms.cadence import Cadence
from offbeat.core import Batch, Batches, Cohort, Visit

SEEDS = (0, 1, 2)
TINY = 1e-12
WALK, LEAP, STRIDE, DEGREE, LATELY = 0.12, 4.0, 0.75, 8, 0.1
ACCORD, FASTEST, ENOUGH, SECOND, LEAST, EVENED = 1.3, 2.0, 20, 0.01, 1e-3, 0.5
FITTED, FOLLOWED = 0.25, 10
BINS = (0.03, 0.1, 0.3, 0.6, 1.0)  # parts of a run over which signals are averaged
LOOKS = (0.1, 0.25, 0.5, 0.75, 1.0)  # when the model is evaluated
AVERAGES = (0.9, 0.98)
TIERS = {"mild": ((1, 2), (3, 5), (5, 8)), "large": ((1, 2), (3, 5), (50, 80))}
RATES = tuple((10 ** (n / 2), server) for n in range(-16, 10) for server in (0.5, 1.0, 2.0))
PARTS = 6  # of the grid of rates, which are jobs of their own
RIVALS = ("adamasfl", "delta-sgd", "dog", "fadas-da", "fedexp", "fedsps", "ringmaster-lmo")
ADAPTIVE = tuple((10.0**n, server) for n in range(-6, 4) for server in (1e-3, 3e-3, 1e-2, 3e-2, 0.1))

Rule = dict[str, Any]  # "rule": its name, and its constants


# --- schedule -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Who fills which buffer, from which version, with which rows."""

    clients: np.ndarray  # (T, S)
    versions: np.ndarray  # (T, S)
    rows: np.ndarray  # (T, S, K, batch)
    last_use: dict[int, int]  # of a version, as the buffer that needs it last


def make_schedule(system: System, parts: list[np.ndarray], seed: int) -> Schedule:
    """`concurrency` clients are at work; one that comes back is replaced by one that is idle."""
    rng = np.random.default_rng([seed, 11])
    count, size = system.clients, system.buffer
    tier = rng.integers(3, size=count)

    def seconds(client: int) -> float:
        if system.delays == "exponential":
            return float(rng.exponential(1.0))
        low, high = TIERS[system.delays][tier[client]]
        return float(rng.uniform(low, high))

    flight: list[tuple[float, int, int]] = []  # when, client, version
    for client in rng.permutation(count)[: system.concurrency]:
        heapq.heappush(flight, (seconds(client), int(client), 0))
    away = {client for _, client, _ in flight}
    clients, versions, rows = [], [], []
    for version in range(system.rounds):
        buffer: list[tuple[int, int]] = []
        while len(buffer) < size:
            now, client, sent = heapq.heappop(flight)
            buffer.append((client, sent))  # it stays `away` until the buffer is full: once in a buffer
            begins = version if len(buffer) < size else version + 1
            if begins > version:
                away -= {one for one, _ in buffer}
            new = int(rng.choice(np.setdiff1d(np.arange(count), list(away))))
            away.add(new)
            heapq.heappush(flight, (now + seconds(new), new, begins))
        clients.append([client for client, _ in buffer])
        versions.append([sent for _, sent in buffer])
        rows.append([_rows(rng, parts[client], system) for client, _ in buffer])
    last_use = {int(v): t for t, row in enumerate(versions) for v in row}
    return Schedule(np.array(clients), np.array(versions), np.array(rows), last_use)


def _rows(rng: np.random.Generator, part: np.ndarray, system: System) -> np.ndarray:
    """Passes over a client's rows, each in a new order."""
    need = system.steps * system.batch
    passes = [rng.permutation(part) for _ in range(-(-need // len(part)))]
    return np.concatenate(passes)[:need].reshape(system.steps, system.batch)


# --- rules --------------------------------------------------------------------------------------------


@dataclass
class Signals:
    """What the server sees of a full buffer, each of shape (rules,) unless it says otherwise."""

    version: int
    age: float
    sent: Tensor  # mean logarithm of the units that these clients were sent
    part: Tensor  # |g0| / (|g0| + |gK - g0|), one minibatch at both ends of the task
    part_max: Tensor  # the same with the longer of the two in place of g0
    part_off: Tensor  # the same with the distance of gK from the line between 0 and g0
    anchor: Tensor  # cosine of the task's gradients and of the control variate that was sent
    turn: Tensor  # cosine of a new gradient and the way so far, mean over the task
    keep: Tensor  # cosine of g0 and gK
    slope: Tensor  # of the first minibatch's loss along the way, at its start, by the larger gradient
    slope_end: Tensor  # the same at its end
    rise: Tensor  # (lK - l0) / (|lK| + |l0|) of the first minibatch's loss
    met: Tensor  # l0
    calm: Tensor  # first norm by largest
    agree: Tensor | None  # square of the sum's length, by that of noise, or None: too few steps yet
    buffers: int  # since the last look
    tasks: int  # in this buffer
    distance: Tensor  # of the path from the first model
    back: Tensor  # cosine of the mean step and of the mean steps before
    loss: Tensor  # that the clients met, by the lowest so far
    path: Tensor  # the same with the server's steps before the model that each client was sent
    bend: Tensor  # of the first minibatch's loss along the way: what its slope foretold and did not come
    above: Tensor  # (l - m) / (l + m), for that loss at the path l, and at the path's mean m
    risen: Tensor  # the same with the loss at the first model in place of m
    ratio: Tensor  # l0 / (l0 + 0.12 V |g0|), V being the unit that was sent


@dataclass
class Group:
    """Configurations of one rule, and what it remembers."""

    name: str
    rows: list[int]
    constants: list[Rule]
    device: torch.device
    memory: dict[str, Tensor] = field(default_factory=dict)

    def get(self, name: str, default: float) -> Tensor:
        """One constant of every configuration."""
        values = [float(rule.get(name, default)) for rule in self.constants]
        return torch.tensor(values, device=self.device, dtype=torch.float64)


def agreement(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """The present rule: the unit grows while directions agree, and never shrinks."""
    if seen.agree is None:
        return unit
    excess = seen.agree / group.get("accord", ACCORD) ** 2 - 1
    growth = excess.clamp_min(0).minimum(group.get("fastest", FASTEST))
    return (unit * (1 + growth * seen.buffers / (seen.buffers + seen.age))).minimum(
        group.get("cap", 2) * size
    )


def agreement_sent(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """The same, reckoned from the unit that the clients were sent."""
    if seen.agree is None:
        return unit
    factor = (seen.agree / group.get("accord", ACCORD) ** 2).clamp_min(1).minimum(group.get("most", 8))
    return unit.maximum(seen.sent.exp() * factor).minimum(group.get("cap", 2) * size)


def cosine(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """Growth by agreement, shrinking where new gradients point back along the way."""
    bound = group.get("bound", -0.2)
    over = (seen.turn - bound).clamp_max(0)
    grown = agreement(group, unit, size, seen)
    return torch.where(over < 0, unit * torch.exp(group.get("gain", 3) * over / (1 + seen.age)), grown)


def _target(group: Group, seen: Signals) -> Tensor:
    """The logarithm of the unit at which the gradient would change by `change` of itself, within bounds."""
    ratio = seen.part.clamp(1e-4, 1 - 1e-4)
    wanted = torch.log(group.get("change", 1) * ratio / (1 - ratio))
    return seen.sent + wanted.maximum(-group.get("down", 4).log()).minimum(group.get("up", 4).log())


def curvature(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """The unit follows that length, at once downwards and by a part upwards."""
    target, now = _target(group, seen), unit.log()
    pace = torch.where(target < now, group.get("fall", 1), group.get("rise", 0.3))
    return torch.exp(now + pace * (target - now)).minimum(group.get("cap", 1e9) * size)


def agreement_curvature(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """Growth by agreement, and that length as a ceiling."""
    ceiling = _target(group, seen).exp()
    grown = (
        agreement_sent(group, unit, size, seen)
        if group.get("waits", 1)[0]
        else agreement(group, unit, size, seen)
    )
    lower = torch.exp(unit.log() + group.get("fall", 1) * (ceiling.log() - unit.log()))
    return torch.where(ceiling < unit, lower, grown.minimum(ceiling))


def agreement_rise(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """Growth by agreement, shrinking where the first minibatch's loss is higher at the end of a task."""
    over = (seen.rise - group.get("bound", 0)).clamp_min(0)
    grown = agreement_sent(group, unit, size, seen)
    return torch.where(over > 0, unit * torch.exp(-group.get("gain", 3) * over / (1 + seen.age)), grown)


def agreement_search(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """Growth by agreement; the lowest point of the first minibatch's loss along the way is a ceiling."""
    bend = (seen.slope - seen.slope_end).clamp_min(1e-6)
    factor = (group.get("beyond", 1) * seen.slope.clamp_min(1e-3) / bend).clamp(0.25, 4)
    ceiling = seen.sent.exp() * factor
    return agreement_sent(group, unit, size, seen).minimum(ceiling)


def steered(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """The unit follows a target, reckoned from what was sent, by how far one minibatch's gradient turned.

    If `keep` is above 0, the cosine of that gradient at the two ends of a task is held at that value.
    Otherwise the change of that gradient is held at `change` of its length, and at more where the task
    lowered its loss (`bonus`). The other constants are switches of the study: see the comments.
    """
    ratio, bound = seen.part.clamp(1e-4, 1 - 1e-4), group.get("keep", 0)
    change = group.get("change", 1) * (1 + group.get("bonus", 0) * (-seen.rise).clamp(0, 1))
    by_part, by_keep = torch.log(change * ratio / (1 - ratio)), seen.keep - bound
    both = group.get("both", 0)  # 1: the lesser of the two, 2: their mean
    wanted = torch.where(bound > 0, by_keep, by_part)
    wanted = torch.where(both == 1, by_part.minimum(by_keep), wanted)
    wanted = group.get("gain", 1) * torch.where(both == 2, (by_part + by_keep) / 2, wanted)
    if (
        seen.agree is not None
    ):  # `boost` above 0: agreement may ask for more, unless the gradient turned so far
        more = torch.log((seen.agree / ACCORD**2).clamp_min(TINY))
        may = (
            (group.get("boost", 0) > 0) & (change * ratio / (1 - ratio) > group.get("boost", 0)) & (more > 0)
        )
        wanted = torch.where(may, wanted.maximum(more), wanted)
    if seen.agree is not None:
        group.memory["agree"] = seen.agree / ACCORD**2
    agreed = group.memory.get("agree", torch.zeros_like(unit))
    veto, push = group.get("veto", 1e9), group.get("push", 1e9)  # no shrinking, or growth, from there on
    wanted = torch.where(agreed > veto, wanted.clamp_min(0), wanted)
    wanted = torch.where(agreed > push, wanted.clamp_min(math.log(1.5)), wanted)
    over = (seen.back - group.get("back", -2)).clamp_max(0)  # the server's own steps turn back
    wanted = torch.where(over < 0, wanted.clamp_max(0) + group.get("brake", 2) * over, wanted)
    wanted = wanted.maximum(-group.get("down", 4).log()).minimum(group.get("up", 4).log())
    now = unit.log()
    target = torch.where(group.get("blind", 0) > 0, now + wanted / (1 + seen.age), seen.sent + wanted)
    pace = torch.where(target < now, group.get("fall", 1), group.get("rise", 1))
    pace = pace * seen.tasks / (seen.tasks + group.get("few", 0))
    far = group.memory["far"] = seen.distance.maximum(group.memory.get("far", seen.distance))
    most = (group.get("start", 0.02) * size).maximum(
        group.get("reach", 1e9) * far
    )  # by the way that was gone
    return torch.exp(now + pace * (target - now)).minimum(group.get("cap", 20) * size).minimum(most)


def joint(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """Steered by the gradient's change, and the more upwards the more directions agree."""
    which = group.get("which", 0)
    ratio = torch.where(which == 1, seen.part_max, seen.part)
    ratio = torch.where(which == 2, seen.part_off, ratio).clamp(1e-4, 1 - 1e-4)
    wanted = group.get("gain", 2) * torch.log(group.get("change", 1) * ratio / (1 - ratio))
    if seen.agree is not None:
        group.memory["agree"] = seen.agree
    agreed = group.memory.get("agree", torch.zeros_like(unit)) / group.get("accord", 4)
    lift = (group.get("lift", 1) * agreed.clamp_min(TINY).log()).maximum(-group.get("floor", 0))
    lift = lift.minimum(group.get("most", 9))
    wanted = torch.where(group.get("veto", 0) > 0, wanted.maximum(lift), wanted + lift)
    brake = torch.where(group.get("lagged", 0) > 0, seen.path, seen.back)
    brake = torch.where(group.get("lagged", 0) == 2, seen.anchor, brake)
    over = (brake - group.get("back", -2)).clamp_max(0)
    wanted = torch.where(over < 0, wanted.clamp_max(0) + group.get("brake", 2) * over, wanted)
    bound = group.get("bound", 4).log()
    worse = seen.loss.clamp_min(TINY).log() - group.get("guard", 1e9).log()  # the loss met, by its lowest
    slide = group.get("slide", 0)
    wanted = torch.where(worse > 0, wanted.clamp_max(0) - slide * worse, wanted)
    wanted = wanted.maximum(-bound).minimum(bound)
    now = unit.log()
    pace = seen.tasks / (seen.tasks + torch.where(wanted > 0, group.get("few_up", 3), group.get("few", 3)))
    pace = pace * (group.get("hold", 1e9) / (seen.version + 1)).clamp_max(1)
    slow = (group.get("hold_down", 1e9) / (seen.version + 1)).clamp_max(1)
    pace = torch.where(wanted < 0, pace * slow, pace)
    target = torch.where(group.get("blind", 0) > 0, now + wanted / (1 + seen.age), seen.sent + wanted)
    pace = torch.where(target < now, pace * group.get("fall", 1), pace)
    made = torch.exp(now + pace * (target - now)).minimum(group.get("cap", 1e30) * size)
    high = group.memory["high"] = made.maximum(group.memory.get("high", unit))
    return made.maximum(high / group.get("keep_of", 1e30))


def gated(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """Growth by agreement, reckoned from what was sent, while gradients are steady and losses fall."""
    if seen.agree is None:
        return unit
    ratio = seen.part.clamp(1e-4, 1 - 1e-4)
    room = ratio / (1 - ratio) / group.get("change", 1)
    factor = (seen.agree / group.get("accord", ACCORD) ** 2).minimum(group.get("most", 3))
    factor = torch.where(room > 1, factor.minimum(room ** group.get("gain", 1)), torch.ones_like(factor))
    factor = torch.where(seen.loss > group.get("guard", 1e9), torch.ones_like(factor), factor.clamp_min(1))
    pace = seen.tasks / (seen.tasks + group.get("few", 0))
    move = (seen.sent + factor.log() - unit.log()).clamp_min(0)
    slide = group.get("slide", 0) * (
        seen.loss.clamp_min(TINY).log() - group.get("worse", 1e9).log()
    ).clamp_min(0)
    return (unit * torch.exp(pace * move - slide / (1 + seen.age))).minimum(group.get("cap", 2) * size)


def bent(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """The unit follows the length at which the loss of a minibatch bends by so much along a task."""
    bend = seen.bend.clamp(1e-3, 1)
    length = 4 * bend / (1 + bend)  # on a parabola, by that of its lowest point
    wanted = group.get("gain", 1) * torch.log(group.get("aim", 1) / length)
    wanted = wanted.maximum(-group.get("down", 4).log()).minimum(group.get("up", 4).log())
    now, target = unit.log(), seen.sent + wanted
    pace = seen.tasks / (seen.tasks + group.get("few", 3))
    pace = torch.where(target < now, pace * group.get("fall", 1), pace)
    made = torch.exp(now + pace * (target - now)).minimum(group.get("cap", 1e30) * size)
    high = group.memory["high"] = made.maximum(group.memory.get("high", unit))
    return made.maximum(high / group.get("keep_of", 1e30))


def aligned(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """Growth by agreement, or while gradients point along the control variates; shrinks where they oppose."""
    pace = seen.tasks / (seen.tasks + group.get("few", 3))
    before = group.memory.get("along", torch.zeros_like(seen.anchor))
    along = group.memory["along"] = before + pace * (seen.anchor - before)
    over, least = along - group.get("over", -0.4), group.get("least", 0)
    wanted = torch.where(
        over < 0, group.get("gain", 2) * over, group.get("kappa", 3) * (along - least).clamp_min(0)
    )
    bound = group.get("bound", 4).log()
    wanted = wanted.maximum(-bound).minimum(bound)
    blind = group.get("blind", 0) > 0  # reckoned from the unit now, and not from what was sent
    move = pace * torch.where(blind, wanted / (1 + seen.age), seen.sent + wanted - unit.log())
    lower, higher = unit * move.clamp_max(0).exp(), unit * move.clamp_min(0).exp()
    agreed = agreement(group, unit, size, seen)
    waiting = unit.maximum(seen.sent.exp() * (1 + group.get("fastest", FASTEST)))  # for who was sent the last
    agreed = torch.where(group.get("waits", 0) > 0, agreed.minimum(waiting), agreed)
    agreed = torch.where(along < group.get("silent", -1), unit, agreed)  # agreement counts from there on
    higher = torch.where(along > least, higher, unit).maximum(agreed)
    worse = seen.loss > group.get("guard", 1e9)  # the loss that clients met, by the lowest
    higher = torch.where(worse, unit, higher)
    return torch.where(over < 0, lower, higher).minimum(group.get("cap", 2) * size)


def bouncing(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """The unit follows the length at which the loss at the path is so much above that at the path's mean."""
    pace = seen.tasks / (seen.tasks + group.get("few", 3))
    before = group.memory.get("above", torch.zeros_like(seen.above))
    above = group.memory["above"] = before + pace * (seen.above - before)
    room = group.get("aim", 0.1) - above
    grows = room > 0
    up = group.get("gain", 10) * room.clamp_max(0.1)
    wanted = torch.where(grows, up, group.get("fall", 10) * (room + group.get("slack", 0)).clamp_max(0))
    move = pace * (seen.sent + wanted - unit.log())
    move = torch.where(grows, move.clamp_min(0), move.clamp_max(0))
    made = unit * move.exp()
    agreed = agreement(group, unit, size, seen)
    made = torch.where((group.get("agrees", 0) > 0) & grows, made.maximum(agreed), made)
    return made.minimum(group.get("cap", 2) * size)


def ratio(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """The unit follows a power of the loss by its gradient's norm, by what that was at first."""
    pace = seen.tasks / (seen.tasks + group.get("few", 10))
    odds = (seen.ratio / (1 - seen.ratio).clamp_min(1e-9)).clamp(1e-6, 1e6)
    first = group.memory.setdefault("first", unit.log())
    level = group.memory.get("level", torch.zeros_like(unit))
    found = seen.sent + odds.log() - (first - group.get("times", 0.7).log())
    level = group.memory["level"] = level + pace * (found - level)
    way = (group.get("power", 1 / 3) * level).minimum(group.get("widest", 1e30).log())
    return torch.exp(first + way)


def distance(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """The distance from the first model, as in DoG."""
    return unit.maximum(group.get("times", 1) * seen.distance).minimum(group.get("cap", 1e9) * size)


def fixed(group: Group, unit: Tensor, size: Tensor, seen: Signals) -> Tensor:
    """One length from the beginning to the end."""
    return unit


RULES = {
    "ratio": ratio,
    "fixed": fixed,
    "agreement": agreement,
    "agreement-sent": agreement_sent,
    "cosine": cosine,
    "curvature": curvature,
    "agreement-curvature": agreement_curvature,
    "agreement-rise": agreement_rise,
    "agreement-search": agreement_search,
    "distance": distance,
    "steered": steered,
    "joint": joint,
    "gated": gated,
    "bent": bent,
    "aligned": aligned,
    "bouncing": bouncing,
}


SETS: dict[str, list[Rule]] = json.loads(Path(__file__).with_name("unit_sets.json").read_text())
STEADY = SETS["steady"][0]  # what `steady.py` does
CHECKED: dict[Any, Rule] = {Steady: STEADY, Bouncing: SETS["bouncing"][0]}
OWN: Rule = {"rule": "method"}  # the project's own Cadence, run as it is


# --- one schedule, many runs --------------------------------------------------------------------------


class Race:
    """All rules, and FedBuff with all rates, on one schedule."""

    def __init__(
        self,
        system: System,
        seed: int,
        rules: list[Rule],
        rates: tuple[tuple[float, float], ...],
        stored: dict[str, np.ndarray],
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.system, self.rules, self.rates = system, rules, rates
        self.device, self.dtype = torch.device(device), dtype
        data = scaled(make_data(system.data, stored), system)
        self.schedule = make_schedule(system, partition(data, system, seed), seed)
        self.model = make_model(system.model, data)
        self.data = self._placed(data)
        first = (self.model.first(seed) * system.weights).to(self.device, dtype)
        self.first = first
        self.ours, self.theirs = len(rules), len(rates)
        self.size = first.norm() if any(rule.get("tiny") for rule in rules) else first.norm().clamp_min(1.0)
        names = list(dict.fromkeys(rule["rule"] for rule in rules))
        self.groups = []
        for name in names:
            rows = [n for n, rule in enumerate(rules) if rule["rule"] == name]
            self.groups.append(Group(name, rows, [rules[n] for n in rows], self.device))
        sizes = torch.tensor(self.model.sizes, device=self.device)
        self.index = torch.repeat_interleave(torch.arange(len(sizes), device=self.device), sizes)
        self.blocked = torch.tensor(
            [n for n, rule in enumerate(rules) if rule.get("block")], device=self.device, dtype=torch.int64
        )
        norms = torch.stack([piece.norm() for piece in first.split(self.model.sizes)])
        least = 0.5 * first.norm() * (sizes / len(first)) ** 0.5  # of a tensor that begins near zero
        self.shares = torch.maximum(norms, least) / torch.maximum(norms, least).norm()
        self.local = (
            torch.tensor([local for local, _ in rates], device=self.device, dtype=dtype) / system.loss
        )
        self.server = torch.tensor([server for _, server in rates], device=self.device, dtype=dtype)

    def _placed(self, data: Data) -> Data:
        real = data.kind != "text"
        x, tx = (
            part.to(self.device, self.dtype) if real else part.to(self.device)
            for part in (data.inputs, data.test_inputs)
        )
        kind = self.dtype if data.kind == "regression" else torch.int64
        y, ty = (part.to(self.device, kind) for part in (data.targets, data.test_targets))
        return Data(x, y, tx, ty, data.outputs, data.kind)

    def constant(self, name: str, default: float) -> Tensor:
        """Of every rule."""
        values = [float(rule.get(name, default)) for rule in self.rules]
        return torch.tensor(values, device=self.device, dtype=self.dtype)

    def gradient(self, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients and losses of (runs, clients) models on the rows (clients, batch)."""
        pieces = [piece.detach().requires_grad_() for piece in at.split(self.model.sizes, -1)]
        outputs = self.model.apply(self.model.parts(pieces), self.data.inputs[rows])
        found = losses(self.data, outputs, self.data.targets[rows]) * self.system.loss
        return torch.cat(torch.autograd.grad(found.sum(), pieces), -1), found.detach()

    @torch.no_grad()
    def loss(self, at: Tensor, rows: Tensor) -> Tensor:
        """Losses alone."""
        pieces = list(at.split(self.model.sizes, -1))
        outputs = self.model.apply(self.model.parts(pieces), self.data.inputs[rows])
        return losses(self.data, outputs, self.data.targets[rows]) * self.system.loss

    def first_ratio(self) -> Tensor:
        """The first loss by its gradient's norm, as up to 20 clients report it."""
        plan = self.schedule
        some = [(t, n) for t, row in enumerate(plan.versions) for n, v in enumerate(row) if v == 0][:20]
        rows = torch.tensor(np.stack([plan.rows[t, n, 0] for t, n in some]), device=self.device)
        g, loss = self.gradient(self.first.expand(1, len(some), -1), rows)
        told = loss / (loss + self.size * g.norm(dim=-1))
        part = told[told.isfinite()].mean()
        return self.size * part / (1 - part).clamp_min(TINY)

    def blocks(self, of: Tensor) -> Tensor:
        """Norms of each tensor's part, (..., tensors)."""
        return torch.stack([piece.norm(dim=-1) for piece in of.split(self.model.sizes, -1)], -1)

    @torch.no_grad()
    def score(self, at: Tensor) -> Tensor:
        """Of (runs,) models on the test rows."""
        found = [at.new_zeros(0)]
        for few in (each for each in at.split(16) if len(each)):
            pieces = list(few.unsqueeze(1).split(self.model.sizes, -1))
            outputs = self.model.apply(self.model.parts(pieces), self.data.test_inputs.unsqueeze(0))
            found.append(scores(self.data, outputs, self.data.test_targets))
        return torch.cat(found)

    def tasks(
        self, start: Tensor, stride: Tensor, rest: Tensor, rows: Tensor, anchors: Tensor, middle: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """One task of each client of a buffer, in every run: unit steps added up, gradients, and reports.

        `start` is (runs, clients, d), `stride` (runs, clients, 1), `rest` (rules, clients, d), what control
        variates add, `rows` (clients, K, batch), and `middle` the means of the paths that were sent.
        """
        ours, steps = self.ours, self.system.steps
        way, total = torch.zeros_like(start), torch.zeros_like(rest)
        largest, turn = rest.new_zeros(*rest.shape[:2], 1), rest.new_zeros(rest.shape[:2])
        least = min(1.0, FOLLOWED / steps)
        first = met = calm = None
        some, fitted = self.blocked, self.constant("fitted", FITTED).view(-1, 1, 1)
        tall = rest.new_zeros(len(some), rest.shape[1], len(self.shares))
        for step in range(steps):
            g, loss = self.gradient(start - stride * way, rows[:, step])
            mine = g[:ours]
            norm = mine.norm(dim=-1, keepdim=True)
            if first is None:
                first, met = mine, loss[:ours]
            else:
                gone = way[:ours]
                turn += _cosine(mine, gone)
            largest = torch.maximum(largest, norm)
            v = mine / largest.clamp_min(TINY)
            if len(some):
                tall = torch.maximum(tall, self.blocks(mine[some]))
                v[some] = mine[some] * (self.shares / tall.clamp_min(TINY))[..., self.index]
            u = rest + v
            long = u.norm(dim=-1, keepdim=True).clamp_min(TINY)
            way[:ours] += u * ((long / fitted).clamp(least, 1) / long)
            way[ours:] += g[ours:]
            total += v
        assert first is not None
        assert met is not None
        reports: dict[str, Tensor] = {}
        if ours:
            gone = way[:ours]
            at = start[:ours] - self.constant("probe", 1).view(-1, 1, 1) * stride[:ours] * gone
            last, after = self.gradient(at, rows[:, 0])
            if len(some):  # measured as its steps are
                by = (self.shares / tall.clamp_min(TINY))[..., self.index]
                first, last = first.clone(), last.clone()
                first[some], last[some] = first[some] * by, last[some] * by
            one, other = first.norm(dim=-1), (last - first).norm(dim=-1)
            both = torch.maximum(one, last.norm(dim=-1)).clamp_min(TINY)
            far = gone.norm(dim=-1).clamp_min(TINY)
            calm = one / largest.squeeze(-1).clamp_min(TINY)
            share = ((last * first).sum(-1) / one.square().clamp_min(TINY)).clamp(0, 1)
            off = (last - share.unsqueeze(-1) * first).norm(dim=-1)
            lead = (first * stride[:ours] * gone).sum(-1)  # what the loss would fall by if it did not bend
            center = self.loss(middle, rows[:, 0])
            begun = self.loss(self.first.expand(1, rows.shape[0], -1), rows[:, 0])
            reports = {
                "above": (met - center) / (met.abs() + center.abs()).clamp_min(TINY),
                "risen": (met - begun) / (met.abs() + begun.abs()).clamp_min(TINY),
                "bend": (after - met + lead) / ((after - met).abs() + lead.abs()).clamp_min(TINY),
                "part": (one + 0.5 * TINY) / (one + other + TINY),
                "part_max": both / (both + other).clamp_min(TINY),
                "part_off": one / (one + off).clamp_min(TINY),
                "anchor": _cosine(total, anchors),
                "turn": turn / max(steps - 1, 1),
                "keep": _cosine(first, last),
                "slope": (first * gone).sum(-1) / (both * far),
                "slope_end": (last * gone).sum(-1) / (both * far),
                "rise": (after - met) / (after.abs() + met.abs()).clamp_min(TINY),
                "met": met,
                "calm": calm,
                "ratio": torch.nan_to_num(met / (met + steps**0.5 * stride[:ours, :, 0] * one), nan=0.5),
            }
        return way / steps, total / steps, reports

    def _alive(self, total: Tensor, own: Tensor, told: Tensor) -> Tensor:
        """The part of a client's coordinates that are not zero, or 1 and its change since the last task."""
        now, before = ((each != 0).to(self.dtype).mean(-1) for each in (total, own))
        change = 1 + (now - before) / torch.maximum(now, before).clamp_min(TINY)
        change = torch.where(before > 0, change, told)
        made = torch.where(self.constant("own", 0).unsqueeze(1) > 0, change, now)
        return torch.where(now > 0, made, told)  # who has no gradient at all repeats what it was told

    def run(self) -> list[dict[str, Any]]:
        """The records of all runs."""
        system, plan, ours = self.system, self.schedule, self.ours
        count, steps, t_end = system.clients, system.steps, system.rounds
        zeros = self.first.new_zeros(ours, len(self.first))
        path = self.first.expand(ours + self.theirs, -1).clone()
        x, c, second, gathered = path[:ours].clone(), zeros, zeros, zeros
        z, middling = (
            x,
            self.constant("center", DEGREE),
        )  # the path is compared with that mean
        memory = self.first.new_zeros(count, ours, len(self.first))
        averages = [path[ours:].clone() for _ in AVERAGES]
        unit = self.constant("start", 0.02) * self.size
        times = self.constant("times", 0)  # of the first ratio, a task's way
        unit = torch.where(times > 0, times * self.first_ratio() / WALK, unit)
        walk, leap, most = (
            self.constant("walk", WALK),
            self.constant("leap", LEAP),
            self.constant("stride", STRIDE),
        )
        top, exp = self.constant("top", 1), self.constant("exp", 0)  # most of the server's rate; FedExP's
        single = self.constant("single", 0)  # a buffer of few tasks leaps less far
        undo, mean_met, low = self.constant("undo", 0), self.first.new_zeros(ours), self.first.new_zeros(ours)
        good, good_unit, since = path[:ours], self.first.new_ones(ours), torch.zeros(ours, device=self.device)
        degree, belief = self.constant("degree", DEGREE), self.constant("trust", 1).unsqueeze(1)
        power, length = self.constant("evened", EVENED), self.first.new_zeros(ours)
        seen = age = 0.0
        early, tasks, buffers = 1.0, 0.0, 0
        sums = {
            name: torch.zeros(len(BINS), ours, device=self.device)
            for name in (*_NAMES, "unit", "agree", "back", "path")
        }
        counts, looked = [0] * len(BINS), [0] * len(BINS)
        lately = drift = zeros
        coherent = self.constant("coherent", 0)  # the leap is bounded by what the path goes in that time
        kept: dict[int, tuple[Tensor, Tensor, float, Tensor, Tensor, Tensor, Tensor]] = {}
        loss_now = loss_low = self.first.new_ones(ours)
        patience = self.constant("patience", 10)
        recent = zeros  # the server's steps lately
        left, shorter = self.constant("left", 0), self.constant("shorter", 4)
        few_alive, by_own = self.constant("slow", 3), self.constant("own", 0)  # by the client's last task
        lag, lagged = self.constant("lag", 0), unit.log()  # reckon what was sent from the mean staleness
        revive, ceiling = self.constant("revive", 0), self.first.new_full((ours,), math.inf)
        alive = liveliest = by_own
        alarm, young = self.constant("alarm", 0), self.constant("young", 15)  # of a loss above the first
        stays, cut, risen = self.constant("stays", 0.5), self.constant("cut", 4), torch.zeros_like(by_own)
        returned = torch.zeros(ours, device=self.device)  # to the first model, in this version
        marks = {max(1, round(part * t_end)): n for n, part in enumerate(LOOKS)}
        curve: list[list[float]] = [[] for _ in range(ours + self.theirs * 3)]
        rows = torch.tensor(plan.rows, device=self.device)
        for version in range(t_end):
            trust = 1 / (1 + age)
            kept[version] = (path, trust * c, trust * seen, unit, recent, alive, z)
            sent = plan.versions[version]
            names = torch.tensor(plan.clients[version], device=self.device)
            start = torch.stack([kept[v][0] for v in sent], 1)
            units = torch.stack([kept[v][3] for v in sent], 1)
            own = memory[names].transpose(0, 1)
            anchors = torch.stack([kept[v][1] for v in sent], 1)
            middle = torch.stack([kept[v][6] for v in sent], 1)
            weights = torch.tensor([kept[v][2] for v in sent], device=self.device, dtype=self.dtype)
            rest = belief.unsqueeze(1) * (anchors - weights.view(1, -1, 1) * own)
            stride = torch.cat(
                [walk.unsqueeze(1) / steps**0.5 * units, self.local.unsqueeze(1).expand(-1, len(sent))]
            ).unsqueeze(-1)
            way, total, reports = self.tasks(start, stride, rest, rows[version], anchors, middle)
            # FedBuff, its server steps falling linearly to nothing
            falling = (self.server * self.local * (1 - version / t_end) * steps).unsqueeze(1)
            theirs = path[ours:] - falling * way[ours:].mean(1)
            for n, decay in enumerate(AVERAGES):
                averages[n] = decay * averages[n] + (1 - decay) * theirs
            # Cadence
            descent, shift = way[:ours].mean(1), (total - own).mean(1)
            memory[names] = total.transpose(0, 1)
            stale = float(np.mean(version - sent))
            early *= float((version - sent).max() == version)
            before, age = age, age + (stale - age) * (LATELY + (1 - LATELY) * early)
            share = len(sent) / count
            seen += share * (1 - seen)
            length = length + (descent.norm(dim=-1) - length) * (LATELY if version else 1.0)
            longest = most / (version + 1) ** 0.5
            apart = way[:ours].square().sum(-1).mean(1) / (2 * descent.square().sum(-1)).clamp_min(TINY)
            ahead = torch.where(exp > 0, apart.clamp_min(1), leap)  # FedExP's factor, or the bound by flight
            ahead = ahead * torch.where(single > 0, len(sent) / (len(sent) + single), 1.0)
            drift = drift + (descent - drift) / (2 + age)
            begun = 1 - (1 - 1 / (2 + age)) ** (version + 1)
            net = (drift.norm(dim=-1) / begun / length.clamp_min(TINY)).clamp(TINY, 1)
            # the steps while a client is at work, or how far they take the path
            flight = torch.where(coherent > 0, (1 + age) * net, 1 + age)
            rate = (ahead * walk * steps**0.5 / flight).minimum(longest / length.clamp_min(TINY)).minimum(top)
            second = second + SECOND * (descent.square() - second)
            even = _evened(descent, second / (1 - (1 - SECOND) ** (version + 1)), power)
            mine = path[:ours] - (rate * unit).unsqueeze(1) * even
            c = c + share * shift
            gathered, tasks, buffers = gathered + len(sent) * descent, tasks + len(sent), buffers + 1
            agree = None
            if tasks * steps >= ENOUGH:
                shared = 1 + (1 + before) ** -2
                agree = gathered.square().sum(-1) * steps / (shared * tasks)
            back = _cosine(descent, lately)
            lately = lately + (descent - lately) / (2 + age)
            before_sent = torch.stack([kept[v][4] for v in sent], 1)
            along = _cosine(descent, before_sent.mean(1))
            recent = recent + (even - recent) / (2 + age)
            part = next(n for n, end in enumerate(BINS) if (version + 0.5) / t_end <= end)
            if ours:
                means = {name: values.mean(1) for name, values in reports.items()}
                means_alive = self._alive(total, own, torch.stack([kept[v][5] for v in sent], 1)).mean(1)
                met = reports["met"].clamp_min(0)
                odds = torch.nan_to_num(met / (met + 1), nan=1.0).mean(1)
                found = odds / (1 - odds).clamp_min(TINY)
                weight = 1.0 if version == 0 else len(sent) / (len(sent) + patience)
                loss_now = loss_now + weight * (found - loss_now)
                loss_low = loss_now if version == 0 else loss_low.minimum(loss_now)
                news = torch.tensor(float(sent.min()), device=self.device) >= returned
                pace = len(sent) / (len(sent) + few_alive)
                pace = torch.where(by_own > 0, pace, pace if version else 1.0)
                alive = torch.where(news, alive + pace * (means_alive - alive), alive)
                liveliest = torch.where(by_own > 0, 1.0, liveliest.maximum(alive))
                signals = Signals(
                    version,
                    age,
                    torch.where(lag > 0, lagged, units.log().mean(1)),
                    agree=agree,
                    buffers=buffers,
                    tasks=len(sent),
                    back=back,
                    path=along,
                    loss=loss_now / loss_low.clamp_min(TINY),
                    distance=(mine - self.first).norm(dim=-1),
                    **means,
                )
                counts[part] += 1
                for name in _NAMES:
                    sums[name][part] += torch.nan_to_num(means[name].float())
                sums["unit"][part] += unit.float().log()
                sums["back"][part] += back.float()
                sums["path"][part] += along.float()
                if agree is not None:
                    looked[part] += 1
                    sums["agree"][part] += agree.float()
                unit = self._next_unit(unit, signals).minimum(ceiling)
                dead = (revive > 0) & (alive * revive < liveliest) & news
                if dead.any():  # back towards the first model, with a part of the unit at most
                    mine = torch.where(
                        dead.unsqueeze(1), self.first + left.unsqueeze(1) * (mine - self.first), mine
                    )
                    ceiling = torch.where(dead, signals.sent.exp().to(unit.dtype) / shorter, ceiling)
                    unit = unit.minimum(ceiling)
                    alive = torch.where(dead, liveliest, alive)
                    returned = torch.where(dead, float(version + 1), returned)
                told = reports["risen"].nan_to_num(nan=1.0).clamp_min(0)
                told = told * (torch.tensor(sent, device=self.device) < young.unsqueeze(1))
                pace = len(sent) / (len(sent) + 3)
                risen = torch.where(news & ~dead, risen + pace * (told.mean(1) - risen), 0.0)
                alarmed = (alarm > 0) & (risen > alarm)
                lagged = lagged + (unit.log() - lagged) / (1 + age)
                if alarmed.any():  # part of the way back, with a part of the unit
                    mine = torch.where(
                        alarmed.unsqueeze(1), self.first + stays.unsqueeze(1) * (mine - self.first), mine
                    )
                    shrunk = unit.minimum(signals.sent.exp().to(unit.dtype) / cut)
                    unit = torch.where(alarmed, shrunk, unit)
                    lagged = torch.where(alarmed, unit.log(), lagged)
                    returned = torch.where(alarmed, float(version + 1), returned)
                    risen = torch.where(alarmed, 0.0, risen)
                if undo.any():  # a model that clients met with a much higher loss is taken back
                    weight = 1.0 if version == 0 else len(sent) / (len(sent) + 10)
                    news = torch.tensor(float(sent.min()), device=self.device) >= since
                    mean_met = torch.where(news, mean_met + weight * (means["met"] - mean_met), mean_met)
                    better = (mean_met < low) | (version == 0)
                    low = torch.where(better, mean_met, low)
                    middle = kept[int(np.sort(sent)[len(sent) // 2])]
                    good = torch.where(better.unsqueeze(1), middle[0][:ours], good)
                    good_unit = torch.where(better, middle[3], good_unit)
                    worse = (undo > 0) & ((mean_met > undo * low) | ~mean_met.isfinite())
                    mine = torch.where(worse.unsqueeze(1), good, mine)
                    unit = torch.where(worse, unit.minimum(good_unit) / 2, unit)
                    mean_met = torch.where(worse, low, mean_met)
                    since = torch.where(worse, float(version + 1), since)
            if agree is not None:
                gathered, tasks, buffers = zeros, 0.0, 0
            x = x + ((degree + 1) / (version + degree + 2)).unsqueeze(1) * (mine - x)
            z = z + ((middling + 1) / (version + middling + 2)).unsqueeze(1) * (mine - z)
            path = torch.cat([mine, theirs])
            for old in [v for v in kept if plan.last_use.get(v, -1) <= version]:
                del kept[old]
            if version + 1 in marks:
                # scores of all rates would take longer than the training of some CNNs
                some = torch.cat([x, theirs, *averages] if version + 1 == t_end else [x])
                for row, value in zip(curve, self.score(some).tolist(), strict=False):
                    row.append(round(value, 2))
        for n in range(len(BINS)):
            for name, values in sums.items():
                values[n] /= max(looked[n] if name == "agree" else counts[n], 1)
        return self._records(curve, sums)

    def _next_unit(self, unit: Tensor, signals: Signals) -> Tensor:
        made = unit.clone()
        for group in self.groups:
            some = _some(signals, group.rows)
            made[group.rows] = RULES[group.name](group, unit[group.rows], self.size, some).to(unit.dtype)
        floor = 1e-6 * self.size
        return torch.nan_to_num(made, nan=0.0).maximum(floor)

    def _records(self, curve: list[list[float]], sums: dict[str, Tensor]) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for n, rule in enumerate(self.rules):
            seen = {name: [_short(v) for v in values[:, n].tolist()] for name, values in sums.items()}
            seen["unit"] = [_short(math.exp(v) / float(self.size)) for v in sums["unit"][:, n].tolist()]
            made.append({"method": "cadence", "words": rule, "curve": curve[n], "signals": seen})
        for n, (local, server) in enumerate(self.rates):
            rows = [curve[self.ours + m * self.theirs + n] for m in range(3)]
            words = {"local_lr": _short(local), "server_lr": server}
            made.append({"method": "fedbuff", "words": words, "curves": rows})
        return made


_NAMES = (
    "above",
    "risen",
    "bend",
    "part",
    "part_max",
    "part_off",
    "anchor",
    "turn",
    "keep",
    "slope",
    "slope_end",
    "rise",
    "met",
    "calm",
    "ratio",
)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _some(signals: Signals, rows: list[int]) -> Signals:
    """Of some rules."""
    given = {
        name: value[rows] if isinstance(value, Tensor) else value for name, value in vars(signals).items()
    }
    return Signals(**given)


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1)).clamp_min(TINY)


def _evened(step: Tensor, squares: Tensor, power: Tensor) -> Tensor:
    usual = squares.sqrt() + LEAST * squares.mean(-1, keepdim=True).sqrt() + TINY
    made = step / usual ** power.unsqueeze(1)
    return made * (step.norm(dim=-1, keepdim=True) / made.norm(dim=-1, keepdim=True).clamp_min(TINY))


# --- methods on the same schedule ---------------------------------------------------------------------


def follow(race: "Race", method: Any, runs: int | None = None) -> Iterator[Any]:
    """The states of a method on the schedule of a race, one after each server step.

    With `runs` its vectors are rows of as many independent runs; it must compute coordinates one by one.
    """
    system, plan = race.system, race.schedule

    class Grad:
        """Of this file's models, of one or of several."""

        def with_loss(self, at: Tensor, batch: Batch, /) -> tuple[Tensor, Tensor]:
            found, loss = race.gradient(at.view(-1, 1, at.shape[-1]), batch.data)  # type: ignore[arg-type]
            return found.view(at.shape), loss.view(at.shape[:-1])

        def __call__(self, at: Tensor, batch: Batch, /) -> Tensor:
            return self.with_loss(at, batch)[0]

    first = race.first if runs is None else race.first.expand(runs, -1).clone()
    state, messages = method.init(first), {}
    memories = {client: method.memory(first) for client in range(system.clients)}
    for version in range(system.rounds):
        messages[version] = method.broadcast(state, version)
        uploads = []
        for n, client in enumerate(plan.clients[version]):
            rows = torch.tensor(plan.rows[version, n])
            items = tuple(Batch(rows[step].view(1, -1)) for step in range(system.steps))
            sent = int(plan.versions[version, n])
            visit = Visit(torch.tensor(sent), torch.tensor(version - sent))
            upload, memories[client] = method.local(
                messages[sent], memories[client], Batches(items), visit, Grad()
            )
            uploads.append(upload)
        mean = type(uploads[0])(*map(_mean, zip(*uploads, strict=True)))
        stale = tuple(int(version - v) for v in plan.versions[version])
        state = method.step(state, mean, Cohort(version, system.clients, stale, (1.0,) * len(stale)))
        for old in [v for v in messages if plan.last_use.get(v, -1) <= version]:
            del messages[old]
        yield state


def _mean(parts: tuple[Any, ...]) -> Any:
    """Of what the clients uploaded; nothing stays nothing."""
    return () if isinstance(parts[0], tuple) else torch.stack(parts).mean(0)


def record_rival(race: "Race", name: str) -> list[dict[str, Any]]:
    """Another method as it is by default, or FADAS-da with a grid of rates, as records of its scores."""
    t_end = race.system.rounds
    marks = {max(1, round(part * t_end)) for part in LOOKS}
    setting = Setting(race.system.buffer, race.system.steps, t_end)
    method, grid = CATALOGUE[name].build(setting), ADAPTIVE if name == "fadas-da" else ()
    if grid:
        local, server = (race.first.new_tensor(rates).unsqueeze(1) for rates in zip(*grid, strict=True))
        object.__setattr__(method, "local_lr", local / race.system.loss)
        object.__setattr__(method, "server_lr", server)
        object.__setattr__(method, "damp", _shrunk)
    curves: list[list[float]] = [[] for _ in grid or (None,)]
    for version, state in enumerate(follow(race, method, len(grid) or None), 1):
        if version == t_end or (version in marks and not grid):
            found = race.score(state.x.view(-1, len(race.first))).tolist()
            for curve, value in zip(curves, found, strict=True):
                curve.append(round(value, 2))
    rates = [{"local_lr": _short(local), "server_lr": server} for local, server in grid] or [{}]
    return [
        {"method": name, "words": {"rule": name} | words, "curve": curve}
        for words, curve in zip(rates, curves, strict=True)
    ]


def _shrunk(rate: Tensor, cohort: Cohort) -> Tensor:
    """The rule of `fadas-da` at its default threshold of 1, for many rates at once."""
    return rate / max(1, *cohort.staleness)


def record_cadence(race: "Race") -> dict[str, Any]:
    """The project's own Cadence, as a record of its model's scores and of its unit."""
    t_end = race.system.rounds
    marks = {max(1, round(part * t_end)) for part in LOOKS}
    curve, logs = [], []
    for version, state in enumerate(follow(race, Cadence.tuned(steps=race.system.steps)), 1):
        logs.append(math.log(max(float(state.unit), TINY)))
        if version in marks:
            curve.append(round(float(race.score(state.x.view(1, -1))[0]), 2))
    size, begun, units = float(race.size), 0, []
    for end in BINS:
        stop = max(begun + 1, round(end * t_end))
        units.append(_short(math.exp(float(np.mean(logs[begun:stop]))) / size))
        begun = min(stop, t_end - 1)
    return {"method": "cadence", "words": OWN, "curve": curve, "signals": {"unit": units}}


def check(stored: dict[str, np.ndarray], method: Any, rule: Rule) -> float:
    """The largest difference between this file's rule and a method of its own, by the model's norm."""
    system = System("check", "digits", "mlp", "dirichlet:0.3", 30, 8, 3, 4, 5, 40, "mild")
    race = Race(system, 0, [rule, rule], (), stored, dtype=torch.float64)
    finals: dict[str, Tensor] = {}
    score = race.score
    race.score = lambda at: (finals.update(x=at[0]), score(at))[1]  # type: ignore[method-assign, func-returns-value]
    race.run()
    *_, state = follow(race, method.tuned(steps=system.steps))
    return float((state.x - finals["x"]).norm() / state.x.norm())


# --- many of them -------------------------------------------------------------------------------------


def work(jobs: Any, results: Any, given: argparse.Namespace, until: float) -> None:
    """Jobs from the queue until it is empty or time is up."""
    torch.set_num_threads(1)
    stored = dict(np.load(given.data))
    rules = SETS.get(given.set, [])
    while time.time() < until:
        try:
            system, seed, what = jobs.get_nowait()
        except queue.Empty:
            break
        begun, name = time.monotonic(), f"{label(system)}, seed {seed}, {what}"
        rival = what in RIVALS
        if given.hasty and time.time() + given.hasty * cost(system, what) > until:
            print(f"{name}: left out, as it would not end in time", flush=True)
            continue
        some = [rule for rule in rules if rule["rule"] in RULES and what == "rules"]
        forms = [rule for rule in rules if rule["rule"] == "varied" and what == "rules"]
        rates = RATES[int(what.split()[-1]) :: PARTS] if what.startswith("rates") else ()
        try:
            race = Race(system, seed, some, rates, stored, given.device)
            records = race.run() if some or rates else []
            records += varied.run(race, forms, LOOKS) if forms else []
            records += [record_cadence(race)] if OWN in rules and what == "rules" else []
            records += record_rival(race, what) if rival else []
        except Exception as error:  # a job that fails must not take the others with it
            print(f"{name}: {error!r}", flush=True)
            continue
        for record in records:
            chosen = {"set": "rivals" if rival else given.set, "draw": given.draw, "seed": seed}
            results.put(chosen | describe(system) | record)
        print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    results.put(None)


def cost(system: System, kind: str = "rules") -> float:
    """About the seconds that a job takes on one core."""
    image = 3 if system.data == "fashion" else 1  # of 14 x 14 in place of 8 x 8
    by_rows = {"transformer": 8e-4, "cnn": 4e-4 * image, "cnn-norm": 4e-4 * image, "linear": 1e-6}
    step = {"deep": 6e-4, "residual": 6e-4, "mlp": 3e-4}.get(system.model, 2e-4)
    step += by_rows.get(system.model, 2e-5) * system.batch
    score = {"transformer": 8, "cnn": 2 * image, "cnn-norm": 2 * image}.get(system.model, 0.3)
    return (4 if kind == "fadas-da" else 1) * (score + system.rounds * system.buffer * system.steps * step)


def main() -> None:
    """Run a set of rules on all systems and seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", choices=SETS)
    parser.add_argument("--rates", action="store_true", help="FedBuff with its grid, too")
    parser.add_argument("--draw", default="development", choices=DRAWS)
    parser.add_argument(
        "--rivals", nargs="*", choices=RIVALS, help="these methods by default, and FADAS-da with a grid"
    )
    parser.add_argument("--only", nargs="*", help="names of systems")
    parser.add_argument("--skip", nargs="*", default=[], help="names of systems")
    parser.add_argument("--lightest", action="store_true", help="begin with what takes the shortest time")
    parser.add_argument(
        "--hasty",
        type=float,
        default=0,
        help="leave out what would not end in time by so many times its cost",
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--out", type=Path, default=Path("unit_rules.jsonl"))
    parser.add_argument("--check", action="store_true", help="against Cadence and its forms, and end")
    given = parser.parse_args()
    if given.check:
        for method, rule in CHECKED.items():
            found = check(dict(np.load(given.data)), method, rule)
            print(f"{method.__name__}: difference by norm {found:.1e}")
        return
    systems = [system for system in DRAWS[given.draw]() if not given.only or label(system) in given.only]
    systems = [system for system in systems if label(system) not in given.skip]
    kinds = ["rules"] if given.set else []
    kinds += [f"rates {n}" for n in range(PARTS)] if given.rates else []
    kinds += given.rivals or []
    wanted = sorted(
        ((system, seed, kind) for system in systems for seed in given.seeds for kind in kinds),
        key=lambda job: (cost(job[0]), job[1]) if given.lightest else (job[1], -cost(job[0])),
    )
    context = multiprocessing.get_context("spawn")
    manager = context.Manager()
    jobs, results = manager.Queue(), manager.Queue()
    for job in wanted:
        jobs.put(job)
    until = time.time() + 60 * given.minutes
    crew = [context.Process(target=work, args=(jobs, results, given, until)) for _ in range(given.processes)]
    for process in crew:
        process.start()
    ended = 0
    with given.out.open("a") as file:
        while ended < len(crew):
            try:
                record = results.get(timeout=5)
            except queue.Empty:
                if not any(process.is_alive() for process in crew):
                    break
                continue
            if record is None:
                ended += 1
            else:
                file.write(json.dumps(record) + "\n")
                file.flush()
    for process in crew:
        process.join()
    print(f"{jobs.qsize()} jobs were left", file=sys.stderr)


if __name__ == "__main__":
    main()
