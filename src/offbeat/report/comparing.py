"""Which runs can be set side by side, and how their settings differ."""

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from offbeat.errors import InputError
from offbeat.report.reading import Run

# What accuracies must share to mean the same.
_SAME = ("data", "model", "clients", "partition", "task")
_ASIDE = ("parameters", "resolved", "format", "algorithm")  # shown in another way, or not settings
_OWN = ("data_dir", "ray_address")  # where things were on somebody's machine
_ORIGIN = ("version", "commit")
_HASH = 10  # letters of a commit that tell it from others
_LONG = 160  # characters of a value that are shown


class Row(NamedTuple):
    """One setting, and what it is for each run; None: it has none."""

    name: str
    values: tuple[str | None, ...]
    differs: bool


def check_comparable(runs: Sequence[Run]) -> None:
    """Refuse runs whose accuracies do not mean the same, and say why."""
    first = runs[0]
    for other in runs[1:]:
        if first.deployed != other.deployed:
            raise _incomparable(first, other, "one is a deployment and the other a simulation")
        for name in _SAME:
            one, two = first.settings.get(name), other.settings.get(name)
            if one != two:
                word = f"--{name.replace('_', '-')}"
                raise _incomparable(
                    first, other, f"{word} is {_word(one)} in one and {_word(two)} in the other"
                )
        sizes = [_resolved(run).get("model_size") for run in (first, other)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise _incomparable(first, other, f"their models have {sizes[0]} and {sizes[1]} parameters")


def settings_table(runs: Sequence[Run]) -> list[Row]:
    """Every setting, those that differ first."""
    columns = [_flat(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [_row(name, [column.get(name) for column in columns]) for name in names]
    return sorted(rows, key=lambda row: not row.differs)


def _row(name: str, values: Sequence[Any]) -> Row:
    """Numbers are shortened where that hides no difference."""
    exact = [None if value is None else json.dumps(value, sort_keys=True) for value in values]
    differs = len(set(exact)) > 1
    texts = [None if value is None else _word(value) for value in values]
    if differs and len(set(texts)) == 1:
        texts = exact
    return Row(name, tuple(texts), differs)


def _flat(run: Run) -> dict[str, Any]:
    """By the words of the command line."""
    resolved = _resolved(run)
    given, worked_out = run.settings.get("parameters"), resolved.get("hyperparameters")
    parameters = _mapping(given) | _mapping(worked_out)
    own = {
        f"--{name.replace('_', '-')}": value
        for name, value in run.settings.items()
        if name not in (*_ASIDE, *_OWN, *_ORIGIN)
    }
    values = {
        "method": run.settings.get("algorithm"),
        **{f"--set {name}": value for name, value in parameters.items()},
        **own,
        "model size": resolved.get("model_size"),
        "engine that was used": resolved.get("engine"),
        "offbeat": run.settings.get("version"),
        "commit": _commit(run.settings.get("commit")),
    }
    return {name: value for name, value in values.items() if value is not None}


def _commit(value: Any) -> str | None:
    return f"{value[:_HASH]}{'+' if value.endswith('+') else ''}" if isinstance(value, str) else None


def _resolved(run: Run) -> dict[str, Any]:
    return _mapping(run.settings.get("resolved"))


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _word(value: Any) -> str:
    """As it is typed; of a file only its name."""
    if isinstance(value, str):
        law, colon, path = value.partition(":")
        text = f"{law}:{PurePath(path).name}" if colon and law == "recorded" else value
    elif value is None:
        text = "not set"
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = json.dumps(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}…"


def _incomparable(first: Run, other: Run, why: str) -> InputError:
    return InputError(
        f"{first.label} and {other.label} cannot be compared, for {why}: "
        "make a report of each, or add --anyway."
    )
