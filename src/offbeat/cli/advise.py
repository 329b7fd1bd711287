"""`offbeat advise`: compares values of concurrency, buffer, staleness limit and deadline without training.

Given the trace of a run or a deployment, it simulates its clients under other settings.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from offbeat.cli import terminal
from offbeat.cli.options import add_settings, number, whole_number
from offbeat.errors import InputError
from offbeat.schedule.advice import (
    ACCEPTED_STALENESS,
    COHORT_DISPATCH,
    Advice,
    ScheduleChoice,
    advise,
    costs,
)
from offbeat.schedule.availability import Dropout
from offbeat.schedule.delays import Delay, Observed, Recorded, parse_delay, read_recorded
from offbeat.training.experiment import Experiment

_Number = TypeVar("_Number", int, float)
_SHARED = ("clients", "delays", "availability", "dropout", "dispatch", "hand_out", "seed")
_COLUMNS = {
    "concurrency": "concurrency",
    "buffer": "buffer",
    "max_staleness": "limit",
    "deadline": "deadline",
    "steps_per_second": "steps/s",
    "updates_per_second": "updates/s",
    "staleness_mean": "stale",
    "staleness_p90": "p90",
    "staleness_max": "max",
    "idle": "idle",
    "wasted": "wasted",
}
_SHARES = ("idle", "wasted")
_MAX_LINES = 12  # of the figure


def add_advise_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat advise`."""
    command.add_argument(
        "source",
        nargs="?",
        metavar="RUN",
        help="take the delays from the folder of a run or of a deployment, or from a file of recorded delays",
    )
    add_settings(command, "schedule", methods_own=False, only=_SHARED)
    for name, kind, metavar, text in (
        ("--concurrency", _numbers(whole_number), "N,...", "the values to compare [up to 80 %% of clients]"),
        ("--buffer", _numbers(whole_number), "S,...", "the values to compare [those of the concurrency]"),
        ("--max-staleness", _numbers(whole_number), "N,...", "the values to compare; none is no limit"),
        ("--deadline", _numbers(number), "SECONDS,...", "limits on a task to compare; none is no limit"),
    ):
        command.add_argument(name, type=kind, metavar=metavar, help=text)
    command.add_argument(
        "--accept-staleness",
        type=number,
        default=ACCEPTED_STALENESS,
        metavar="A",
        help=f"the mean staleness that is acceptable [{ACCEPTED_STALENESS:g}]",
    )
    command.add_argument(
        "--updates",
        type=whole_number,
        metavar="N",
        help="measure N client updates from the start of a run [those of RUN, or enough after the start]",
    )
    command.add_argument(
        "-o", "--out", type=_svg_file, metavar="FILE", help="draw the figure into this SVG file"
    )


def _svg_file(text: str) -> Path:
    """A path to write a figure to."""
    if not Path(text).name:
        raise argparse.ArgumentTypeError(f"'{text}' is not the name of a file")
    return Path(text)


def _numbers(kind: Callable[[str], _Number]) -> Callable[[str], tuple[_Number | None, ...]]:
    """A converter of numbers separated by commas; `none` is no limit."""

    def convert(text: str) -> tuple[_Number | None, ...]:
        return tuple(None if word.strip() == "none" else kind(word.strip()) for word in text.split(","))

    return convert


@dataclass(frozen=True)
class _Source:
    """Where the delays come from, and what is known beside them."""

    delays: Delay
    title: str
    settings: dict[str, Any] = field(default_factory=dict)  # of `advise`, unless they are given
    recorded: dict[str, Any] | None = None  # what a run did


def advise_command(given: argparse.Namespace) -> int:
    """Compare the combinations, and print which one to take."""
    source = _find_source(given)
    typed = {name: value for name, value in vars(given).items() if name in _SHARED and name != "delays"}
    settings = {"clients": Experiment.clients} | source.settings | typed
    for name in ("concurrency", "buffer", "max_staleness", "deadline"):
        values = getattr(given, name)
        if values is not None:
            settings[name] = values
    for name in ("concurrency", "buffer"):
        if None in settings.get(name, ()):
            raise InputError(f"--{name} takes whole numbers: 'none' is for --max-staleness and --deadline.")
    _include_recorded(settings, source)
    if given.updates is not None:
        settings["updates"] = given.updates
    found = advise(source.delays, accept_staleness=given.accept_staleness, **settings)
    if given.out is not None:
        _draw(found, source, given.out)
    twin = None
    if source.recorded is not None:
        twin = next((each for each in found.choices if _is_recorded(each, source.recorded)), None)
    if given.json:
        compared = None if source.recorded is None else source.recorded | {"twin": twin and asdict(twin)}
        print(json.dumps(found.as_dict() | {"delays": source.title, "recorded": compared}))
        return 0
    _print_choices(found, source, settings["clients"])
    print(found.sentence)
    if source.recorded is not None:
        _print_recorded(source.recorded, twin)
    if given.out is not None:
        print(f"drawn in {given.out}")
    return 0


def _find_source(given: argparse.Namespace) -> _Source:
    if given.source is None:
        delays = getattr(given, "delays", Experiment.delays)
        kind, _, path = delays.partition(":")
        return _read_file(path) if kind == "recorded" and path else _Source(parse_delay(delays), delays)
    if hasattr(given, "delays"):
        raise InputError(f"the delays come from {given.source}: leave out --delays.")
    path = Path(given.source)
    return _read_file(given.source) if path.is_file() else _read_run(path)


def _read_file(path: str) -> _Source:
    """Recorded delays: by client, if the file says whose they are."""
    by_client = read_recorded(path)
    title = f"delays in {path}"
    if not by_client:
        return _Source(Recorded(path), title)
    _check_clients(by_client, path)
    return _Source(Observed(by_client), title, {"clients": len(by_client)})


def _check_clients(seen: Sequence[int] | dict[int, Any], what: str) -> None:
    if len(seen) < 2:
        raise InputError(
            f"{what} has tasks of {'one client' if seen else 'no client'} only, so there is nothing to "
            "choose: give one of at least two clients."
        )


def _read_run(folder: Path) -> _Source:
    from offbeat.report.trace import (  # loads NumPy
        DamagedFileError,
        damaged_error,
        no_run_sentence,
        pending_durations,
        read_lines,
        task_durations,
    )
    from offbeat.training import settings_file
    from offbeat.training.experiment import is_deployment

    if not (folder / "settings.json").is_file():
        raise InputError(no_run_sentence(folder, "advise"))
    known = settings_file.read(folder)
    trace = folder / "trace.jsonl"
    if not trace.is_file():
        raise InputError(f"the run in {folder} has no trace yet: wait for its first server step.")
    try:
        seen = task_durations(read_lines(trace), pending_durations(folder))
    except DamagedFileError as error:
        raise damaged_error(trace, error) from None
    if not seen.used:
        raise InputError(f"the run in {folder} has no trace yet: wait for its first server step.")
    _check_clients(dict(seen.seconds), str(trace))
    names = ("clients", "dispatch", "hand_out", "seed", "availability")
    settings = {name: known[name] for name in names if name in known}
    settings["max_staleness"] = (known.get("max_staleness"),)
    settings["dropout"] = _dropout(seen.lost, seen.used + seen.dropped, seen.lost_seconds, seen.seconds)
    settings["updates"] = seen.used
    recorded = {name: known.get(name) for name in ("concurrency", "buffer", "max_staleness")}
    if known.get("dispatch") in COHORT_DISPATCH:
        recorded["concurrency"] = recorded["buffer"]
    recorded |= {
        name: getattr(seen, name) for name in ("steps_per_second", "updates_per_second", "staleness_mean")
    }
    kind = "deployment" if is_deployment(known) else "run"
    title = f"the {kind} in {folder}: {seen.used:,} updates of {len(seen.seconds):,} clients"
    return _Source(Observed(seen.seconds), title, settings, recorded)


def _dropout(lost: int, arrived: int, seconds: float, by_client: Any) -> Dropout:
    """The drop-out that loses tasks as often as a trace does, noticed as late."""
    if not lost:
        return Dropout()
    lengths = [length for each in by_client.values() for length in each]
    mean = sum(lengths) / len(lengths)
    return Dropout(lost / (lost + arrived), seconds / mean if mean else 1.0)


def _include_recorded(settings: dict[str, Any], source: _Source) -> None:
    """Add the recorded combination to the default grid."""
    if source.recorded is None or settings.get("concurrency") or settings.get("buffer"):
        return
    from offbeat.schedule.advice import default_sizes

    usual = default_sizes(settings["clients"])
    settings["concurrency"] = sorted({*usual, source.recorded["concurrency"]})
    settings["buffer"] = sorted({*usual, source.recorded["buffer"]})


def _is_recorded(choice: ScheduleChoice, recorded: dict[str, Any]) -> bool:
    return choice.settings == (*(recorded[name] for name in ("concurrency", "buffer", "max_staleness")), None)


def _print_choices(found: Advice, source: _Source, clients: int) -> None:
    columns = [
        name
        for name in _COLUMNS
        if name not in ("max_staleness", "deadline")
        or len({getattr(choice, name) for choice in found.choices}) > 1
    ]
    rows = []
    for choice in found.choices:
        cells = [_cell(name, getattr(choice, name)) for name in columns]
        own = source.recorded is not None and _is_recorded(choice, source.recorded)
        mark = "take" if choice == found.take else "the run" if own else "frontier" if choice.frontier else ""
        rows.append([mark, *cells])
    how = (
        f"after the start, {found.updates:,} client updates or more each"
        if found.settled
        else f"the first {found.updates:,} client updates of each"
    )
    heads = ["", *(_COLUMNS[name] for name in columns)]
    terminal.print_table(f"{source.title}; {clients:,} clients; {how}", heads, rows)


def _cell(name: str, value: Any) -> Any:
    return f"{value:.0%}" if name in _SHARES else round(value, 3) if isinstance(value, float) else value


def _print_recorded(recorded: dict[str, Any], twin: ScheduleChoice | None) -> None:
    text = (
        f"The run itself, with a concurrency of {recorded['concurrency']} and a buffer of "
        f"{recorded['buffer']}, made {recorded['updates_per_second']:.3g} client updates and "
        f"{recorded['steps_per_second']:.3g} server steps per second at a mean staleness of "
        f"{recorded['staleness_mean']:.3g}"
    )
    print(f"{text}, where this computes {costs(twin)}." if twin else f"{text}.")


def _draw(found: Advice, source: _Source, path: Path) -> None:
    """Write the figure: the staleness of each buffer over client updates per second."""
    import numpy as np

    from offbeat.files import replace_file
    from offbeat.report.chart import Axis, Figure, Series
    from offbeat.report.svg import draw, standalone

    lines: dict[tuple[Any, ...], list[ScheduleChoice]] = {}
    for choice in found.choices:
        lines.setdefault(choice.settings[1:], []).append(choice)
    if len(lines) > _MAX_LINES:
        raise InputError(
            f"a figure shows at most {_MAX_LINES} lines, not {len(lines)}: compare fewer values of --buffer, "
            "--max-staleness or --deadline."
        )
    limits = len({key[1:] for key in lines}) > 1
    series = []
    for style, each in enumerate(lines.values()):
        xs, ys = (
            np.array([getattr(choice, name) for choice in each])
            for name in ("updates_per_second", "staleness_mean")
        )
        first = each[0]
        words = [f"buffer {first.buffer}"]
        words += [] if first.max_staleness is None or not limits else [f"limit {first.max_staleness}"]
        words += [] if first.deadline is None or not limits else [f"{first.deadline:g} s"]
        series.append(Series(style, ", ".join(words), xs, ys))
    place = (np.array([getattr(found.take, name)]) for name in ("updates_per_second", "staleness_mean"))
    series.append(Series(len(series), f"take: concurrency {found.take.concurrency}", *place))
    figure = Figure(
        "frontier",
        f"What a higher concurrency costs: {source.title}",
        Axis("client updates per second", log=True),
        Axis("mean staleness, versions", zero=True),
        tuple(series),
    )
    try:
        replace_file(path, standalone(draw(figure), dark=True).encode())
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): name another file.") from None
