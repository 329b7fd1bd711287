"""Writes settings.md, the table of all settings, from their descriptions: `python docs/settings.py`."""

from collections.abc import Iterable
from pathlib import Path

from offbeat.cli.options import option_name
from offbeat.deploy.config import TABLES
from offbeat.training.experiment import Experiment
from offbeat.training.schema import NamedSetting, ValueKind, settings_of

_TYPES = {
    ValueKind.TEXT: "text",
    ValueKind.INTEGER: "whole number",
    ValueKind.NUMBER: "number",
    ValueKind.SWITCH: "true or false",
    ValueKind.TABLE: "table",
    ValueKind.DEADLINE: "number or text",
    ValueKind.CLIP: "number, or numbers by field",
}
_HEAD = ("setting", "type", "default", "option", "`serve.toml`", "meaning")
_OPTIONS = {"algorithm": "`ALGORITHM`", "parameters": "`--set`"}


def page(experiment: type = Experiment) -> str:
    """The page as Markdown."""
    parts = [
        "# Settings",
        "This page is made from the descriptions in the code by `python docs/settings.py`. A setting has the "
        "same name in Python (`offbeat.Experiment`), in the `settings.json` of a run and in `serve.toml`; on "
        "the command line it is an option with hyphens.",
        "## Of an experiment",
        _table(settings_of(experiment).values(), options=True),
        "## Of a deployment alone",
        "These are keys of the tables of `serve.toml`: [Training over real sites](deploy.md).",
    ]
    others = [cls for classes in TABLES.values() for cls in classes if cls is not Experiment]
    parts.append(_table([each for cls in others for each in settings_of(cls).values()], options=False))
    return "\n\n".join(parts) + "\n"


def _table(settings: Iterable[NamedSetting], options: bool) -> str:
    rows = [_row(each, options) for each in settings]
    head = _HEAD if options else tuple(name for name in _HEAD if name != "option")
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(each: NamedSetting, options: bool) -> tuple[str, ...]:
    info = each.info
    range_ = f", {info.interval}" if info.interval else ""
    kind = f"{_TYPES[each.kind]}{range_}{f' {info.unit}' if info.unit else ''}"
    default = "required" if each.required else info.default_text or _shown(each.default)
    option = (_OPTIONS.get(each.name) or f"`{option_name(each.name)}`",) if options else ()
    table = f"`[{info.table}]`" if info.table else "–"
    return f"`{each.name}`", kind, default, *option, table, each.help.replace("|", "\\|")


def _shown(value: object) -> str:
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    Path(__file__).with_name("settings.md").write_text(page())
