"""The tables of README.md, from the JSON files beside it: printed, or with `--write` put into it."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.reproduce.page import table_command

from offbeat.renamed import present_command

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
CONCURRENCIES = (10, 20, 40, 60, 90)
CHOSEN_AT = 20  # the concurrency of the grids

_SHORT = {"local_lr": "local", "server_lr": "server", "alpha": "alpha"}


def load(name: str) -> Any:
    """One of the JSON files of this folder; commands have the present names of options."""
    return json.loads(present_command((HERE / f"{name}.json").read_text()))


def trials(name: str) -> dict[str, dict[int, dict[str, Any]]]:
    """What each method did at each concurrency."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in load(name)["runs"]:
        for method, trial in run["methods"].items():
            found.setdefault(method, {})[run["concurrency"]] = trial
    return found


def chosen(data: str) -> dict[str, dict[str, float]]:
    """The rates with the highest last accuracy on the grid; of equals the lower ones."""
    entries = sorted(
        _grid(data), key=lambda e: (e["accuracy"] or 0.0, [-rate for rate in e["rates"].values()])
    )
    return {entry["method"]: entry["rates"] for entry in entries}


def tables() -> dict[str, str]:
    """Everything between markers, by the name of its marker."""
    return {
        "fashion-mnist": accuracies("records"),
        "fashion-mnist commands": commands("records"),
        "fashion-mnist sent": sent("records"),
        "fashion-mnist devices": devices(),
        "fashion-mnist grid": grid("fashion-mnist"),
        "fashion-mnist reference": reference(),
        "fashion-mnist cost": cost("records", "fashion-mnist", "minutes of processes, several at a time"),
        "digits": accuracies("digits"),
        "digits commands": commands("digits"),
        "digits grid": grid("digits"),
        "digits cost": cost("digits", "digits", "minutes of processes, each with one thread"),
    }


def accuracies(name: str) -> str:
    """Test accuracy at the end; the change from the least to the most concurrency."""
    rows = []
    for method, trial in trials(name).items():
        first, last = _end(trial[CONCURRENCIES[0]]), _end(trial[CONCURRENCIES[-1]])
        change = "" if first is None or last is None else f"{last - first:+.3f}"
        rates = _rates(trial[CHOSEN_AT]["rates"]) or "from S, K, T"
        rows.append([method, rates, *[_outcome(trial[one]) for one in CONCURRENCIES], change])
    return _table(["method", "rates", *map(str, CONCURRENCIES), "change, 10 to 90"], rows)


def sent(name: str) -> str:
    """What was sent, and at each concurrency the mean staleness and the virtual time of the last step."""
    rows = []
    for method, trial in trials(name).items():
        gigabytes = trial[CHOSEN_AT]["records"]["bytes"][-1] / 1e9
        rows.append([method, f"{gigabytes:.1f}", *[_pace(trial[one]) for one in CONCURRENCIES]])
    return _table(["method", f"GB at {CHOSEN_AT}", *map(str, CONCURRENCIES)], rows)


def grid(data: str) -> str:
    """Every pair of rates that was tried; the chosen one in bold."""
    best = chosen(data)
    rows: dict[str, list[str]] = {}
    for entry in _grid(data):
        text = f"{_rates(entry['rates'])}: {_result(entry['accuracy'], entry['failure'])}"
        bold = entry["rates"] == best[entry["method"]]
        rows.setdefault(entry["method"], []).append(f"**{text}**" if bold else text)
    return _table(["method", "rates: accuracy"], [[method, "; ".join(row)] for method, row in rows.items()])


def reference() -> str:
    """The reference's figure beside this project's at the same rates, where there is one."""
    rows = []
    for entry in load("reference"):
        theirs = entry["accuracy"]
        cells = [f"{_mine(entry, one)} / {theirs.get(str(one), '–')}" for one in CONCURRENCIES]
        rows.append([entry["method"], _rates(entry["rates"]) or "from S, K, T", *cells])
    return _table(["method", "rates", *map(str, CONCURRENCIES)], rows)


def devices() -> str:
    """The beginning of one run of the table, done again on the CPU."""
    again = load("records")["cpu"]
    first = trials("records")[again["method"]][again["concurrency"]]["records"]
    rows = []
    for index, version in enumerate(again["records"]["version"]):
        same = first["version"].index(version)
        times = again["records"]["time"][index], first["time"][same]
        scores = again["records"]["accuracy"][index], first["accuracy"][same]
        rows.append([str(version), *(f"{one:.2f}" for one in times), *(f"{one:.3f}" for one in scores)])
    head = ["version", "time, CPU", "time, CUDA", "accuracy, CPU", "accuracy, CUDA"]
    return "\n".join(["```sh", present(again["command"]), "```", "", _table(head, rows)])


def present(command: str) -> str:
    """A recorded command with the present name of the one option that has another since."""
    return command.replace(" --every ", " --eval-every ")


def commands(name: str) -> str:
    """Those of one concurrency; the others differ in that number alone."""
    shown = [present(run["command"]) for run in load(name)["runs"] if run["concurrency"] == CHOSEN_AT]
    return "\n".join(["```sh", *shown, "```"])


def cost(name: str, data: str, unit: str) -> str:
    """How long it all took."""
    table = sum(run["seconds"] for run in load(name)["runs"]) / 60
    tried = sum(entry["seconds"] for entry in load("grid")[data]) / 60
    return f"Cost: {table:.0f} {unit}, for the table, and {tried:.0f} for the grid."


def _grid(data: str) -> list[dict[str, Any]]:
    return [entry for entry in load("grid")[data] if entry["concurrency"] == CHOSEN_AT]


def _end(trial: dict[str, Any]) -> float | None:
    return None if trial["failure"] else trial["records"]["accuracy"][-1]


def _outcome(trial: dict[str, Any]) -> str:
    return _result(_end(trial), trial["failure"])


def _result(accuracy: float | None, failure: str | None) -> str:
    if failure is None:
        return f"{accuracy:.3f}"
    step = re.search(r"server step (\d+)", failure)
    return f"diverged at {step[1]}" if step else "diverged"


def _pace(trial: dict[str, Any]) -> str:
    if trial["failure"]:
        return "diverged"
    ages = trial["records"]["staleness_mean"][1:]
    return f"{sum(ages) / len(ages):.1f} / {trial['records']['time'][-1]:.0f}"


def _mine(entry: dict[str, Any], concurrency: int) -> str:
    """From the table where it used these rates, else from the runs beside it."""
    trial = trials("records")[entry["method"]][concurrency]
    if entry["rates"].items() <= trial["rates"].items():
        return _outcome(trial)
    for other in load("grid")["fashion-mnist"]:
        same = other["method"] == entry["method"] and other["concurrency"] == concurrency
        if same and entry["rates"].items() <= other["rates"].items():
            return _result(other["accuracy"], other["failure"])
    return "–"


def _rates(rates: dict[str, float]) -> str:
    return ", ".join(f"{_SHORT[name]} {value:g}" for name, value in rates.items())


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


if __name__ == "__main__":
    table_command(PAGE, tables)
