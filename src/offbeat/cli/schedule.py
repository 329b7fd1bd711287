"""`offbeat schedule`: time alone, without training."""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from offbeat.algorithms.momentum_error import relative_errors
from offbeat.algorithms.ranges import within
from offbeat.cli import show
from offbeat.cli.given import experiment_options, warn_of_unused
from offbeat.experiment import Experiment
from offbeat.schedule.availability import Dropout, parse_availability
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.filled import Filled
from offbeat.schedule.flow import Flow
from offbeat.schedule.statistics import fills, summarise
from offbeat.trial import timing


def schedule(given: argparse.Namespace) -> int:
    """Simulate, and show staleness and waiting."""
    experiment = Experiment.of(**experiment_options(given))
    dispatch = timing(experiment)
    source = dispatch.source(experiment.seed)
    delays = parse_delay(experiment.delays).bind(source, experiment.clients)
    clock = Clock(delays, source, Dropout(experiment.dropout))
    limit = float("inf") if experiment.limit is None else experiment.limit
    availability = parse_availability(experiment.availability)
    flow = Flow(clock, dispatch, source, experiment.clients, experiment.buffer, limit, availability)
    if given.momentum is not None:
        within("momentum BETA", given.momentum, "(-1, 1)")
    warn_of_unused(given, [experiment])
    steps = fills(flow, experiment.rounds)
    staleness: list[tuple[int, ...]] = []
    wanted = given.momentum is not None
    result = summarise(_noted(steps, staleness) if wanted else steps, flow).as_dict()
    errors = _momentum(given.momentum, staleness) if wanted else {}
    if given.json:
        print(json.dumps(result | ({"momentum": errors} if errors else {})))
    else:
        histogram = result.pop("staleness_counts")
        show.pairs(
            f"{experiment.dispatch} dispatch, {experiment.delays}, {experiment.rounds:,} server steps", result
        )
        if errors:
            show.pairs("|AW - M|^2 / |M|^2, how far momentum is from momentum without delay", errors)
        _draw(histogram)
    return 0


def _noted(steps: Iterable[Filled], staleness: list[tuple[int, ...]]) -> Iterator[Filled]:
    """The same buffers, how stale their updates are being written down on the way."""
    for step in steps:
        staleness.append(step.staleness)
        yield step


def _momentum(beta: float, staleness: Sequence[tuple[int, ...]]) -> dict[str, float]:
    span = 1 + max(map(max, staleness))
    return {"beta": beta} | relative_errors(staleness, beta, span)._asdict()


def _draw(histogram: Any) -> None:
    """Staleness of the consumed updates, as bars."""
    if not histogram:
        return
    counts = {int(age): count for age, count in dict(histogram).items()}
    width = max(1, -(-(max(counts) + 1) // 12))
    bins: dict[int, int] = {}
    for age, count in counts.items():
        bins[age // width] = bins.get(age // width, 0) + count
    total, most = sum(bins.values()), max(bins.values())
    print("staleness of the updates used")
    for place in range(max(bins) + 1):
        count = bins.get(place, 0)
        name = str(place) if width == 1 else f"{place * width}-{place * width + width - 1}"
        print(f"{name:>9}  {'█' * round(40 * count / most):<40} {100 * count / total:5.1f} %")
