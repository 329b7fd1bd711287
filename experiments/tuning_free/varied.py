"""Cadence with other constants, and with rules that were tried beside its own, many forms at a time.

A form is a dictionary of what it has in place of the method's constants (`CONSTANTS`); all forms run on the
schedule of one race, as rows of the same tensors. With nothing in the dictionary the steps are those of
`offbeat.algorithms.cadence`. `unit_rules.py` runs the forms of a set whose rule is `varied`.

The rules that were tried, all of them on the server's step r U |D| alone:

- `top`: r is at most this.
- `bound`: the step is at most this part of the norm of the model, or of the first one if that is more.
- `polyak`: the step is at most this many ratios, divided by the norm of D.
- `warm`: r is smaller by (t + 1) / (warm (1 + age)) at first.
- `brake`: r is multiplied by e^h, where h follows the cosine of D and its recent mean, less `zero`.
- `lead`: the step follows D and `lead` times what it differs by from that mean.
- `tail`: the model is a mean of the path over at least so many times 1 + age steps.
- `between`: clients are sent a mean of the path and the model, with this weight of the model.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from experiments.tuning_free.unit_rules import Race

TINY = 1e-12
CONSTANTS: dict[str, float] = {
    "walk": 0.12,
    "leap": 8,
    "stride": 0.75,
    "longest": 0.12,
    "unit": 6,
    "farthest": 1,
    "power": 1 / 3,
    "degree": 8,
    "few": 10,
    "even": 1,
    "recent": 0.1,
    "second": 0.01,
    "least": 1e-3,
    "top": math.inf,
    "bound": math.inf,
    "polyak": math.inf,
    "warm": 0,
    "brake": 0,
    "zero": -0.1,
    "lead": 0,
    "tail": 0,
    "between": 0,
}


def run(race: "Race", forms: list[dict[str, Any]], looks: tuple[float, ...]) -> list[dict[str, Any]]:
    """The scores of each form's model at some parts of the run, and its unit at the end."""
    system, plan, first = race.system, race.schedule, race.first
    steps, size_of_buffer, count = system.steps, system.buffer, system.clients
    values = {
        name: first.new_tensor([float(form.get(name, usual)) for form in forms])
        for name, usual in CONSTANTS.items()
    }
    walk, recently = values["walk"], values["recent"]
    size = first.norm().clamp_min(1.0)
    local = walk / steps**0.5
    zeros = first.new_zeros(len(forms), len(first))
    none = first.new_zeros(len(forms))
    x = path = first.expand(len(forms), -1).clone()
    c = second = lately = zeros
    memory = first.new_zeros(count, len(forms), len(first))
    seen, early, tasks = 0.0, 1.0, 0
    age = unit = length = part = brake = none
    recent = sent_level = size.log() + none
    kept: dict[int, tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = {}
    marks = {max(1, round(look * system.rounds)) for look in looks}
    curves: list[list[float]] = [[] for _ in forms]
    rows = torch.tensor(plan.rows)
    for t in range(system.rounds):
        trust = 1 / (1 + age)
        reach = unit / values["unit"] if t else size + none
        start = path + values["between"].unsqueeze(1) * (x - path)
        kept[t] = (start, trust.unsqueeze(1) * c, trust * seen, unit, reach)
        sent = [int(version) for version in plan.versions[t]]
        names = torch.tensor(plan.clients[t])
        start, anchor, weight, units, reach = (
            torch.stack([kept[version][n] for version in sent], 1) for n in range(5)
        )
        own = memory[names].transpose(0, 1)
        way, total, ratio = _tasks(
            race,
            start,
            anchor - weight.unsqueeze(-1) * own,
            local,
            values["unit"],
            units,
            reach,
            rows[t],
            values["farthest"],
        )
        mean = way.mean(1)
        shift = (total - own).mean(1)
        memory[names] = total.transpose(0, 1)
        stale = [t - version for version in sent]
        early *= float(max(stale) == t)
        age = age + (sum(stale) / len(stale) - age) * (recently + (1 - recently) * early)
        seen += size_of_buffer / count * (1 - seen)
        norm = mean.norm(dim=-1)
        length = length + (norm - length) * (recently if t else 1.0)

        alone = min(stale) == t
        told = ratio.mean(1).clamp(0.0 if alone else 0.01, 0.99)
        pace = size_of_buffer / (size_of_buffer + values["few"])
        if alone:
            tasks += size_of_buffer
            part = part + (told - part) * size_of_buffer / tasks
            recent = recent + (pace if t else 1.0) * (size.log() + _logit(told) - recent)
        elif max(stale) < t:
            recent = recent + pace * (sent_level + _logit(told) - recent)
        level = (1 - values["power"]) * (size.log() + _logit(part)) + values["power"] * recent
        level = level.minimum((values["farthest"] * path.norm(dim=-1).maximum(size)).log())
        sent_level = sent_level + (level - sent_level) / (1 + age) if t else level
        unit = values["unit"] * level.exp()

        rate = (values["leap"] * walk * steps**0.5 / (1 + age)).minimum(
            values["stride"] / (t + 1) ** 0.5 / length.clamp_min(TINY)
        )
        rate = rate.minimum(values["longest"] / norm.clamp_min(TINY)).minimum(values["top"])
        farthest = values["bound"] * path.norm(dim=-1).maximum(size)
        rate = rate.minimum(farthest / (unit * norm).clamp_min(TINY))
        rate = rate.minimum(values["polyak"] / (values["unit"] * length * norm).clamp_min(TINY))
        if t:
            turned = (mean * lately).sum(-1) / (norm * lately.norm(dim=-1)).clamp_min(TINY) - values["zero"]
            pace = size_of_buffer / (size_of_buffer + 10) / (1 + age) ** 0.5
            brake = (brake + values["brake"] * pace * turned).clamp_max(0)
        rate = rate * brake.exp()
        begun = (t + 1) / (values["warm"] * (1 + age)).clamp_min(1)
        rate = torch.where(values["warm"] > 0, rate * begun.clamp_max(1), rate)
        led = mean + values["lead"].unsqueeze(1) * (mean - lately) if t else mean
        led = led * (norm / led.norm(dim=-1).clamp_min(TINY)).unsqueeze(1)
        lately = lately + (mean - lately) / (2 + age).unsqueeze(1)
        second = second + values["second"].unsqueeze(1) * (mean.square() - second)
        squares = second / (1 - (1 - values["second"]) ** (t + 1)).unsqueeze(1)
        usual = squares.sqrt() + values["least"].unsqueeze(1) * squares.mean(-1, keepdim=True).sqrt() + TINY
        made = led / usual ** values["even"].unsqueeze(1)
        made = made * (norm / made.norm(dim=-1).clamp_min(TINY)).unsqueeze(1)
        path = path - (rate * unit).unsqueeze(1) * made
        c = c + size_of_buffer / count * shift
        degree = (t + 1) / (values["tail"].clamp_min(TINY) * (1 + age)) - 1
        degree = torch.where(values["tail"] > 0, degree.clamp_min(0.5), math.inf).minimum(values["degree"])
        x = x + ((degree + 1) / (t + degree + 2)).unsqueeze(1) * (path - x)
        for old in [version for version in kept if plan.last_use.get(version, -1) <= t]:
            del kept[old]
        if t + 1 in marks:
            for curve, score in zip(curves, race.score(x).tolist(), strict=True):
                curve.append(round(score, 2))
    return [
        {"method": "cadence", "words": form, "curve": curve, "signals": {"unit": [float(f"{last:.4g}")]}}
        for form, curve, last in zip(forms, curves, (unit / race.size).tolist(), strict=True)
    ]


def _tasks(
    race: "Race",
    start: Tensor,
    rest: Tensor,
    local: Tensor,
    times: Tensor,
    units: Tensor,
    reach: Tensor,
    rows: Tensor,
    farthest: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tasks of a buffer in every form: mean steps, mean directions, and what is told of the ratio."""
    way, total = torch.zeros_like(start), torch.zeros_like(start)
    largest, ratio = torch.zeros_like(units), torch.zeros_like(units)
    stride = local.unsqueeze(1) * units
    unknown = stride == 0
    steps = race.system.steps
    for step in range(steps):
        g, loss = race.gradient(start - stride.unsqueeze(-1) * way, rows[:, step])
        norm = g.norm(dim=-1)
        if step == 0:
            ratio = (loss / (loss + reach * norm)).clamp_max(0.99)
            silent = torch.where(unknown, 1 / 21, 0.5).to(ratio)
            ratio = torch.where((loss > 0) & (norm > 0) & ratio.isfinite(), ratio, silent)
            first = (reach * ratio / (1 - ratio)).minimum(farthest.unsqueeze(1) * reach)
            first = (local * times).unsqueeze(1) * first
            stride = torch.where(unknown, first, stride)
        largest = largest.maximum(norm)
        v = g / largest.clamp_min(TINY).unsqueeze(-1)
        u = rest + v
        way = way + u / u.norm(dim=-1, keepdim=True).clamp_min(TINY)
        total = total + v
    return way / steps, total / steps, ratio


def _logit(part: Tensor) -> Tensor:
    return part.clamp_min(TINY).log() - (1 - part).log()
