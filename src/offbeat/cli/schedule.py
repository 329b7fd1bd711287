"""`offbeat schedule`: time alone, without training."""

import argparse
import json
from typing import Any

from offbeat.cli import show
from offbeat.cli.given import experiment_options, warn_of_unused
from offbeat.experiment import Experiment
from offbeat.schedule.availability import Dropout, parse_availability
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.flow import Flow
from offbeat.schedule.statistics import simulate
from offbeat.trial import timing


def schedule(given: argparse.Namespace) -> int:
    """Simulate, and show staleness and waiting."""
    experiment = Experiment.of(**experiment_options(given) | {"algorithm": "fedbuff"})
    dispatch = timing(experiment)
    source = dispatch.source(experiment.seed)
    delays = parse_delay(experiment.delays).bind(source, experiment.clients)
    clock = Clock(delays, source, Dropout(experiment.dropout))
    limit = float("inf") if experiment.limit is None else experiment.limit
    availability = parse_availability(experiment.availability)
    flow = Flow(clock, dispatch, source, experiment.clients, experiment.buffer, limit, availability)
    warn_of_unused(given, [experiment])
    result = simulate(flow, experiment.rounds).as_dict()
    if given.json:
        print(json.dumps(result))
    else:
        histogram = result.pop("staleness_counts")
        show.pairs(
            f"{experiment.dispatch} dispatch, {experiment.delays}, {experiment.rounds:,} server steps", result
        )
        _draw(histogram)
    return 0


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
