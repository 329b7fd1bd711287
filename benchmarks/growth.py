"""How the cost of a server step grows: with the model, the cohort, the local steps and the population.

    python benchmarks/growth.py [--largest 7] [--turns 3] [--device cuda] [--svg FILE] [--quick]

Synchronous FedAvg of a perceptron with two hidden layers: one quantity varies, and the others are 100,000
weights, a cohort of 10, 5 local steps of 10 examples and 1,000 clients. *Limit* is the same number of
gradients of one batch with shared weights that is as large as those of all clients together. Turns of
offbeat and of the limit alternate, and the least of several turns counts. `--largest 8` goes to 10^8 weights
and needs 6 GB of memory.

On a CPU, with one thread, a turn is one server step and its cost is processor time, everything included,
which other programs on the machine disturb little. On a GPU a turn is ten server steps, which the processor
prepares while the GPU computes, and its cost is time; products are rounded to TF32. The run is declared to be
short, so that nothing is compiled.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from offbeat import Examples, FedOpt, Population, Problem, Sequential, Steps, Synchronous, Vectorised, train
from offbeat.nn.problem import cross_entropies
from offbeat.training.build import choose_engine

LR, INPUTS, CLASSES, BATCH = 0.01, 100, 10, 10


class Size(NamedTuple):
    """What varies."""

    weights: int = 100_000
    cohort: int = 10
    steps: int = 5
    population: int = 1000


class Cost(NamedTuple):
    """Seconds of one server step."""

    size: Size
    weights: int  # exactly
    offbeat: float
    limit: float


def sweeps(largest: int) -> dict[str, list[Size]]:
    """The sizes of each curve."""
    return {
        "weights": [Size(weights=10**k, cohort=10 if k < 8 else 4) for k in range(4, largest + 1)],
        "cohort": [Size(cohort=count) for count in (1, 3, 10, 30, 100, 300, 1000)],
        "steps": [Size(steps=count) for count in (1, 3, 10, 30, 100)],
        "population": [Size(population=10**k) for k in range(2, 7)],
    }


def perceptron(weights: int) -> nn.Module:
    """About so many weights."""
    linear = INPUTS + CLASSES + 2
    width = round((math.sqrt(linear**2 + 4 * weights) - linear) / 2)
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def measure(size: Size, turns: int, device: str) -> Cost:
    """One point."""
    row, warm = (1, 2) if device == "cpu" else (10, 8)  # server steps of a turn, and those before the first
    generator = torch.Generator().manual_seed(0)
    total = 5000
    inputs = torch.randn(total, INPUTS, generator=generator)
    targets = torch.randint(0, CLASSES, (total,), generator=generator)
    rng = np.random.default_rng(0)
    parts = list(rng.integers(0, total, (size.population, 20)))  # clients may share examples
    inputs, targets = inputs.to(device), targets.to(device)
    population = Population(Examples(inputs, targets), parts, Steps(size.steps, BATCH))
    module = perceptron(size.weights).to(device)
    problem = Problem(module, cross_entropies)
    chosen = choose_engine(problem, population, 0, 1).name
    engine = (Vectorised if chosen == "vectorised" else Sequential)(problem, population)
    dispatch = Synchronous(size.cohort)
    rounds = warm + turns * row
    shots = train(FedOpt(LR, 1.0), engine, dispatch=dispatch, buffer=size.cohort, rounds=rounds)
    for _ in range(warm + 1):
        next(shots)
    optimiser = torch.optim.SGD(module.parameters(), LR)
    rows = torch.arange(size.cohort * BATCH, device=device) % total

    def offbeat() -> None:
        for _ in range(row):
            next(shots)

    def limit() -> None:
        for _ in range(size.steps * row):
            optimiser.zero_grad()
            cross_entropy(module(inputs[rows]), targets[rows]).backward()
            optimiser.step()

    limit()
    seconds: list[list[float]] = [[], []]
    for _ in range(turns):
        for own, turn in zip(seconds, (offbeat, limit), strict=True):
            own.append(spent(turn, device) / row)
    shots.close()  # type: ignore[attr-defined]
    return Cost(size, problem.size, *map(min, seconds))


def spent(turn: Callable[[], object], device: str) -> float:
    """Seconds of the processor, or on a GPU those until all is done."""

    def now() -> float:
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    begun = now()
    turn()
    return now() - begun


WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 210, 64, 34, 74
TITLES = {
    "weights": "weights of the model",
    "cohort": "clients in a cohort",
    "steps": "local steps",
    "population": "clients in the population",
}


def draw(curves: dict[str, list[Cost]], device: str) -> str:
    """Four panels with logarithmic axes."""
    unit = "seconds of processor time" if device == "cpu" else "seconds on a GPU"
    whole = (2 * (WIDTH + GAP) + LEFT, 2 * (HEIGHT + GAP) + TOP)
    costs = [cost for curve in curves.values() for point in curve for cost in (point.offbeat, point.limit)]
    low, high = math.floor(math.log10(min(costs))), math.ceil(math.log10(max(costs)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]} {whole[1]}" '
        f'font-family="sans-serif" font-size="12"><title>Cost of a server step, in {unit}, beside the '
        'limit</title><rect width="100%" height="100%" fill="white"/>'
    ]
    for place, (name, curve) in enumerate(curves.items()):
        left, top = LEFT + (place % 2) * (WIDTH + GAP), TOP + (place // 2) * (HEIGHT + GAP)
        parts += panel(name, curve, left, top, (low, high))
    return "\n".join([*parts, "</svg>\n"])


def panel(name: str, curve: Sequence[Cost], left: int, top: int, ends: tuple[int, int]) -> list[str]:
    """One curve and its limit."""
    values = [point.weights if name == "weights" else getattr(point.size, name) for point in curve]
    first, last = math.log10(min(values)), math.log10(max(values))
    low, high = ends

    def across(value: float) -> float:
        return left + WIDTH * (math.log10(value) - first) / (last - first)

    def up(value: float) -> float:
        return top + HEIGHT * (high - math.log10(value)) / (high - low)

    parts = [f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    for power in range(low, high + 1):
        y = up(10.0**power)
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    for power in range(math.ceil(first - 0.05), math.floor(last + 0.05) + 1):
        x = min(max(across(10.0**power), left), left + WIDTH)
        word = f"{10**power:,}" if power < 4 else f'10<tspan dy="-5" font-size="9">{power}</tspan>'
        parts.append(f'<text x="{x:.1f}" y="{top + HEIGHT + 16}" text-anchor="middle">{word}</text>')
    middle = left + WIDTH / 2
    parts.append(f'<text x="{middle}" y="{top + HEIGHT + 34}" text-anchor="middle">{TITLES[name]}</text>')
    for word, colour, dash in (("offbeat", "#1f5fa8", ""), ("limit", "#b3541e", "5 3")):
        heights = [up(getattr(point, word)) for point in curve]
        line = " ".join(f"{across(x):.1f},{y:.1f}" for x, y in zip(values, heights, strict=True))
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{line}" {style}/>')
        shift = -8 if heights[-1] == min(up(curve[-1].offbeat), up(curve[-1].limit)) else 16
        parts.append(
            f'<text x="{left + WIDTH - 6}" y="{heights[-1] + shift:.1f}" text-anchor="end" '
            f'fill="{colour}">{word}</text>'
        )
    return parts


def main() -> None:
    """Print a table and a line of JSON; draw a figure on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--largest", type=int, default=7, help="the power of ten of the largest model")
    parser.add_argument("--turns", type=int, default=3, help="server steps that are timed")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--svg", type=Path, help="a file for the figure")
    parser.add_argument("--quick", action="store_true", help="two points of each, to see that it runs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True  # as offbeat has it
    curves: dict[str, list[Cost]] = {}
    for name, sizes in sweeps(given.largest).items():
        print(f"\n{TITLES[name]:>26}{'offbeat, ms':>14}{'limit, ms':>12}{'ratio':>8}")
        curves[name] = []
        for size in itertools.islice(sizes, 2 if given.quick else None):
            cost = measure(size, given.turns, given.device)
            value = cost.weights if name == "weights" else getattr(size, name)
            ratio = cost.offbeat / cost.limit
            print(
                f"{value:>26,}{1e3 * cost.offbeat:>14.3g}{1e3 * cost.limit:>12.3g}{ratio:>8.3g}", flush=True
            )
            curves[name].append(cost)
    if given.svg:
        given.svg.write_text(draw(curves, given.device))
    print(json.dumps({name: [(cost.size, *cost[1:]) for cost in curve] for name, curve in curves.items()}))


if __name__ == "__main__":
    main()
