"""Tables of what `unit_rules.py` found.

`python -m experiments.tuning_free.unit_table compact RAW... --out unit_rules.jsonl` makes compact records
of its output: a line for each set of rules with the rules' constants, and a line for each system under a
set with the results.

- `python -m experiments.tuning_free.unit_table show --draw development --set fifth` prints the rules of a
  set, best first: mean and worst shortfall against FedBuff's best rates, and failures. `--systems` adds a
  column for each system, `--words` keeps to rules that have all of these words, and `--draw` takes several
  draws with commas between them.
- `python -m experiments.tuning_free.unit_table best --draw development` prints FedBuff's best and the
  best fixed unit of each system.
- `python -m experiments.tuning_free.unit_table sweep` prints results by scale, `python -m
  experiments.tuning_free.unit_table scales` those of Cadence and FedBuff alone, as docs/cadence.md has them,
  `python -m experiments.tuning_free.unit_table curves` the long runs, and `python -m
  experiments.tuning_free.unit_table lengths --draw panel` fixed units with local steps of other lengths.
- `python -m experiments.tuning_free.unit_table scores --draw busy --set seventeenth` prints the scores of a
  set on a draw that FedBuff did not run on.
"""

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

FAILED = 5.0  # points behind
BOUND = 10.0  # of a shortfall, either way, in the bounded mean
Record = dict[str, Any]


def compact(sources: list[Path], out: Path) -> None:
    """Write one line for each set and for each system under it."""
    rules: dict[str, list[str]] = defaultdict(list)
    found: dict[tuple[str, str, str], Record] = {}
    rates: dict[tuple[str, str], dict[tuple[float, float, int], dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    widest: dict[tuple[str, str], set[float]] = defaultdict(set)
    for line in (line for source in sources for line in source.read_text().splitlines()):
        record = json.loads(line)
        draw, name, system = record.get("draw", "development"), record["set"], record["system"]
        if record["method"] == "fedbuff":
            words = record["words"]
            widest[draw, system].add(words["local_lr"])
            for kind, curve in enumerate(record["curves"]):
                cell = rates[draw, system][words["local_lr"], words["server_lr"], kind]
                cell[record["seed"]] = curve[-1]
            continue
        words = json.dumps(record["words"])
        if words not in rules[name]:
            rules[name].append(words)
        skipped = ("method", "words", "curve", "signals", "seed", "set", "draw")
        about = {key: value for key, value in record.items() if key not in skipped}
        entry = found.setdefault((draw, name, system), {"set": name, "draw": draw, **about, "runs": {}})
        entry["runs"].setdefault(words, {})[record["seed"]] = record
    lines: list[Record] = [
        {"set": name, "rules": [json.loads(text) for text in texts]} for name, texts in rules.items()
    ]
    for (draw, name, _), entry in found.items():
        runs = entry.pop("runs")
        order = [runs[text] for text in rules[name] if text in runs]
        entry["seeds"] = sorted(order[0])
        entry["finals"] = [[runs[seed]["curve"][-1] for seed in entry["seeds"]] for runs in order]
        if "signals" in order[0][entry["seeds"][0]]:  # some records of forms have scores alone
            units = [[runs[seed]["signals"]["unit"][-1] for seed in entry["seeds"]] for runs in order]
            entry["unit"] = [float(f"{math.exp(mean(map(math.log, row))):.2g}") for row in units]
        if name == "first":  # how far one minibatch's gradient turned, by fixed units
            entry["part"] = [
                round(mean(mean(runs[seed]["signals"]["part"][1:]) for seed in entry["seeds"]), 2)
                for runs in order
            ]
        if draw == "long":
            entry["curves"] = [[runs[seed]["curve"] for seed in entry["seeds"]] for runs in order]
        lines.append(entry)
    for (draw, system), cells in rates.items():
        local, server, kind = max(cells, key=lambda key: mean(cells[key].values()))
        best = cells[local, server, kind]
        edge = local in (min(widest[draw, system]), max(widest[draw, system]))
        words = {"local_lr": local, "server_lr": server, "average": (None, 0.9, 0.98)[kind]}
        line = {"draw": draw, "system": system, "fedbuff": words, "rates": len(cells) // 3, "edge": edge}
        lines.append(line | {"seeds": sorted(best), "finals": [best[seed] for seed in sorted(best)]})
    out.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def read(path: Path) -> tuple[dict[str, list[Record]], list[Record], dict[tuple[str, str], Record]]:
    """Return the rules of each set, the systems, and FedBuff's best of each system."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    rules = {record["set"]: record["rules"] for record in records if "rules" in record}
    systems = [record for record in records if "finals" in record and "fedbuff" not in record]
    best = {(record["draw"], record["system"]): record for record in records if "fedbuff" in record}
    for (draw, system), record in list(best.items()):  # panels name a system by the draw that it is of
        best |= {(panel, f"{draw}: {system}"): record for panel in ("panel", "sound")}
    return rules, systems, best


def short_name(rule: Record) -> str:
    """Give a rule's name and constants as text."""
    return ", ".join([rule["rule"]] + [f"{name} {value:g}" for name, value in rule.items() if name != "rule"])


def show(given: argparse.Namespace) -> None:
    """Print the rules of a set on a draw, best first."""
    rules, systems, best = read(given.records)
    draws = given.draw.split(",")
    some = [record for record in systems if record["draw"] in draws and record["set"] == given.set]
    some = [record for record in some if (record["draw"], record["system"]) in best]  # where FedBuff ran, too
    rows = []
    for n, rule in enumerate(rules[given.set]):
        if not all(word in short_name(rule) for word in given.words):
            continue
        behind, failed = [], 0
        for record in some:
            other = best[record["draw"], record["system"]]
            bar = mean(other["finals"])
            behind.append(bar - mean(record["finals"][n]))
            failed += sum(bar - value > FAILED for value in record["finals"][n])
        bounded = mean(max(-BOUND, min(value, BOUND)) for value in behind)
        lost = sum(value > FAILED for value in behind)
        ahead = sum(value < 0 for value in behind)
        rows.append((bounded, mean(behind), max(behind), ahead, lost, failed, short_name(rule), behind))
    columns = [record["system"] for record in some] if given.systems else []
    heads = ["rule", "mean", "bounded mean", "worst", "ahead", "systems failed", "runs failed", *columns]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    for bounded, average, worst, ahead, lost, failed, name, behind in sorted(rows):
        cells = [
            name,
            f"{average:.1f}",
            f"{bounded:.1f}",
            f"{worst:.1f}",
            str(ahead),
            f"{lost} of {len(some)}",
            str(failed),
        ]
        cells += [f"{value:.1f}" for value in behind] if given.systems else []
        print("| " + " | ".join(cells) + " |")


def show_best(given: argparse.Namespace) -> None:
    """Print each system with FedBuff's best and, on the development draw, the best fixed unit."""
    rules, systems, best = read(given.records)
    for record in systems:
        if record["draw"] != given.draw or record["set"] != given.set:
            continue
        other = best[given.draw, record["system"]]
        about = [
            f"{key} {record[key]}"
            for key in ("partition", "concurrency", "buffer", "steps", "batch", "rounds")
        ]
        words = ", ".join(f"{key} {value}" for key, value in other["fedbuff"].items())
        edge = ", at an edge of the grid" if other["edge"] else ""
        line = f"{record['system']} ({', '.join(about)}): {mean(other['finals']):.1f} ({words}{edge})"
        fixed = [n for n, rule in enumerate(rules[given.set]) if rule["rule"] == "fixed"]
        if fixed:
            top = max(fixed, key=lambda n: mean(record["finals"][n]))
            start, value = rules[given.set][top]["start"], mean(record["finals"][top])
            line += f"; best fixed unit {start:g}: {value:.1f}, part {record['part'][top]}"
        print(line)


def show_lengths(given: argparse.Namespace) -> None:
    """Print the shortfall of the best fixed unit, for local steps of several lengths."""
    rules, systems, best = read(given.records)
    some = [record for record in systems if (record["draw"], record["set"]) == (given.draw, "lengths")]
    walks = sorted({rule["walk"] for rule in rules["lengths"]})
    heads = ["local steps, by those of Cadence", "mean", "bounded mean", "worst", "best length in"]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    tops = {}  # of each system, by the length of its local steps: the shortfall with the best unit
    for walk in walks:
        rows = [n for n, rule in enumerate(rules["lengths"]) if rule["walk"] == walk]
        for record in some:
            bar = mean(best[given.draw, record["system"]]["finals"])
            tops[walk, record["system"]] = bar - max(mean(record["finals"][n]) for n in rows)
    for walk in walks:
        behind = [tops[walk, record["system"]] for record in some]
        bounded = mean(max(-BOUND, min(value, BOUND)) for value in behind)
        first = sum(
            tops[walk, record["system"]] == min(tops[other, record["system"]] for other in walks)
            for record in some
        )
        cells = [f"{walk / 0.12:.2f}", f"{mean(behind):.1f}", f"{bounded:.1f}", f"{max(behind):.1f}"]
        print("| " + " | ".join([*cells, f"{first} of {len(some)}"]) + " |")


def show_scores(given: argparse.Namespace) -> None:
    """Print the mean score of each rule of a set on each system of a draw, over its seeds."""
    rules, systems, _ = read(given.records)
    some = [record for record in systems if (record["draw"], record["set"]) == (given.draw, given.set)]
    if not some:  # this set was not run on this draw
        return
    heads = ["rule", "mean", *(record["system"] for record in some)]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    for n, rule in enumerate(rules[given.set]):
        found = [mean(record["finals"][n]) for record in some]
        cells = [f"{value:.1f}" for value in (mean(found), *found)]
        print("| " + " | ".join([short_name(rule), *cells]) + " |")


def show_sweep(given: argparse.Namespace) -> None:
    """Print results by scale: FedBuff's best, and each rule that has the given words."""
    rules, systems, best = read(given.records)
    some = [record for record in systems if (record["draw"], record["set"]) == ("sweep", "final")]
    chosen = [
        n for n, rule in enumerate(rules["final"]) if all(word in short_name(rule) for word in given.words)
    ]
    heads = ["system", "FedBuff", *(short_name(rules["final"][n]) for n in chosen)]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    for record in sorted(some, key=lambda record: record["system"]):
        other = best["sweep", record["system"]]
        cells = [record["system"], f"{mean(other['finals']):.1f}" + (" (edge)" if other["edge"] else "")]
        print("| " + " | ".join(cells + [f"{mean(record['finals'][n]):.1f}" for n in chosen]) + " |")


def show_scales(given: argparse.Namespace) -> None:
    """Print what Cadence and FedBuff's best reach with inputs, weights or loss times 0.01, 1 and 100."""
    _, systems, best = read(given.records)
    found = {
        record["system"]: (mean(record["finals"][0]), mean(best["sweep", record["system"]]["finals"]))
        for record in systems
        if (record["draw"], record["set"]) == ("sweep", "twentieth")
    }
    heads = ["task", "what is multiplied by 0.01, 1 and 100", "Cadence", "FedBuff's best rates"]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    for base in ("digits, mlp", "clear, deep", "fashion, linear", "curve, mlp"):
        for what in ("loss", "inputs", "weights"):
            names = (f"{base}, {what} x 0.01", base, f"{base}, {what} x 100")
            cells = [", ".join(f"{found[name][n]:.1f}" for name in names) for n in (0, 1)]
            print("| " + " | ".join([base, what, *cells]) + " |")


def show_curves(given: argparse.Namespace) -> None:
    """Print the long runs at a tenth, a quarter, a half, three quarters and the end."""
    rules, systems, _ = read(given.records)
    for record in systems:
        for rule, curves, unit in zip(
            rules[record["set"]], record.get("curves", []), record["unit"], strict=False
        ):
            print(f"{record['system']}: {short_name(rule)}: {curves}, unit {unit:g} at the end")


SHOWN = {
    "show": show,
    "best": show_best,
    "lengths": show_lengths,
    "scores": show_scores,
    "sweep": show_sweep,
    "scales": show_scales,
    "curves": show_curves,
}


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["compact", *SHOWN])
    parser.add_argument("sources", type=Path, nargs="*")
    parser.add_argument("--out", type=Path, default=Path("unit_rules.jsonl"))
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "unit_rules.jsonl")
    parser.add_argument("--draw", default="development")
    parser.add_argument("--set", default="first")
    parser.add_argument("--words", nargs="*", default=[])
    parser.add_argument("--systems", action="store_true")
    given = parser.parse_args()
    if given.what == "compact":
        compact(given.sources, given.out)
    else:
        SHOWN[given.what](given)


if __name__ == "__main__":
    main()
