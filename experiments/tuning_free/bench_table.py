"""The bench's tables and figures from bench.jsonl: printed, or with `--write` put into README.md."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from experiments.reproduce.cost_figure import drawings
from experiments.reproduce.page import fill_sections, markdown
from experiments.reproduce.study import Table
from experiments.reproduce.tuning_cost import cost_table
from experiments.tuning_free.outcomes import Flatness, Outcome, costs, described, flatnesses, outcomes
from experiments.tuning_free.runs import recorded
from experiments.tuning_free.systems import GRIDS, HELD_OUT, OURS, PRINTED, SEEDS

from offbeat.report.chart import PERCENT

HERE = Path(__file__).parent
PAGE, RECORDS = HERE / "README.md", HERE / "bench.jsonl"
SUMMARY, SYSTEMS, COST, HELD = "bench summary", "bench systems", "bench cost", "bench held out"
FIGURES = "bench-cost"
MEAN, WORST, SPREAD = 0.5, 2.0, 1.5  # points that are aimed at
RIVALS = tuple(dict.fromkeys(method for grids in GRIDS.values() for method in grids))
NONE = "–"


def points(fraction: float) -> str:
    """Of accuracy; what rounds to nothing has no sign."""
    return f"{round(100 * fraction, 1) + 0.0:.1f}"


def verdict(found: float, aim: float, final: bool) -> str:
    """Whether an aim in points is reached, and whether more runs could change that."""
    return ("reached" if round(found, 6) <= aim else "not reached") + ("" if final else " so far")


def summary(made: Sequence[Outcome]) -> str:
    """The aims beside what was found, and what stands in the way."""
    short = [(outcome, behind) for outcome in made if (behind := outcome.shortfall) is not None]
    flat = [(group, spread) for group in flatnesses(made) if (spread := group.spread) is not None]
    final = all(not outcome.missing and not outcome.former for outcome in made)
    runs, diverged = sum(len(o.ours) for o in made), sum(o.diverged for o in made)
    lines = [_diverged(diverged, runs, final)]
    if flat:
        group, spread = max(flat, key=lambda pair: pair[1])
        told = f"{100 * spread:.2f} points ({_group(group)})"
        kept = verdict(100 * spread, SPREAD, final)
        lines.insert(0, ("largest spread over concurrency", f"at most {SPREAD:g} points", told, kept))
    if short:
        average = mean(behind for _, behind in short)
        worst, most = max(short, key=lambda pair: pair[1])
        told = f"{100 * average:.2f} points, over {len(short)} of {len(made)} systems"
        kept = verdict(100 * average, MEAN, final)
        lines.insert(
            0, ("mean shortfall against the best competitor", f"at most {MEAN:g} points", told, kept)
        )
        told = f"{100 * most:.2f} points ({described(worst.system)[0]})"
        kept = verdict(100 * most, WORST, final)
        lines.insert(1, ("worst shortfall", f"at most {WORST:g} points", told, kept))
    return markdown(Table(("", "aim", "found", ""), tuple(lines), tuple(_remarks(made, short, final))))


def _diverged(count: int, runs: int, final: bool) -> tuple[str, str, str, str]:
    return f"runs of {OURS[0]} that diverged", "none", f"{count} of {runs}", verdict(count, 0, final)


def _remarks(made: Sequence[Outcome], short: Sequence[tuple[Outcome, float]], final: bool) -> list[str]:
    told = []
    beyond = sorted((p for p in short if 100 * p[1] > WORST), key=lambda p: p[1], reverse=True)
    if beyond:
        words = "; ".join(f"{described(outcome.system)[0]} ({points(behind)})" for outcome, behind in beyond)
        told.append(f"Behind by more than {WORST:g} points: {words}.")
    if short:
        ahead = sum(behind < 0 for _, behind in short)
        told.append(f"Ahead of every competitor in {ahead} of {len(short)} systems.")
    partly = sum(outcome.shared != list(SEEDS) for outcome, _ in short)
    if partly:
        apart = [mean(o.best.scores.values()) - mean(o.ours.values()) for o, _ in short if o.best]
        told.append(
            f"In {partly} of these systems the best competitor was run on some of the seeds alone, and the "
            "shortfall is over those. Between means over all seeds that each has it is "
            f"{100 * mean(apart):.2f} points in the mean, {100 * max(apart):.2f} at worst."
        )
    if not final:
        gaps, former = sum(bool(outcome.missing) for outcome in made), sum(outcome.former for outcome in made)
        told.append(
            f"So far: {gaps} of {len(made)} systems have runs missing, and {former} have {OURS[0]} in an "
            "earlier form alone. A system without all its grids counts for no shortfall."
        )
    return told


def concurrency(made: Sequence[Outcome]) -> str:
    """Systems that differ in concurrency alone: ours, and the best competitor of each."""
    lines = []
    for group in flatnesses(made):
        own = [f"{o.system['concurrency']}: {_mean(list(o.ours.values()))}" for o in group.outcomes]
        others = [
            mean(best.scores.values()) for o in group.outcomes if o.judged and (best := o.best) is not None
        ]
        rival = points(max(others) - min(others)) if len(others) == len(group.outcomes) else "missing"
        spread = "missing" if group.spread is None else points(group.spread)
        lines.append((_group(group), ", ".join(own), spread, rival))
    head = "", f"{OURS[0]} by clients at work", "its spread", "spread of the best competitors"
    return markdown(Table(head, tuple(lines)))


def _group(group: Flatness) -> str:
    task, _, words = described(group.outcomes[0].system)[0].partition(": ")
    kept = [word for word in words.split(", ") if not word.endswith("at work")]
    return f"{task}: {', '.join(kept)}" if kept else task


def systems(made: Sequence[Outcome]) -> str:
    """One row for each."""
    head = (
        *("system", "S, K, T, batch", OURS[0], "best competitor", "shortfall"),
        *RIVALS,
        *(f"{PRINTED[0]} as printed", "missing runs"),
    )
    notes = [
        f"Accuracy in %. {OURS[0]}: its last model, mean over {len(SEEDS)} seeds ± their standard deviation. "
        "Competitors: the best of the last model and two averages of it, at the setting that is highest on "
        f"seed {SEEDS[0]}, of their grids and of what was tried beyond: a grid goes on around its best "
        "setting until higher and lower rates do worse. The best competitor is the one that is highest in "
        "the mean over the seeds that it was run on, with its local and server rate; a setting that diverged "
        f"on another seed gives way to the next. Columns of methods are of seed {SEEDS[0]}; that of "
        f"{PRINTED[0]} has its last model, without averages.",
        "Shortfall: points behind the best competitor, negative: ahead; over the seeds that both have, which "
        "are named where they are not all.",
    ]
    if any(outcome.former for outcome in made):
        notes.append(
            "\\*: an earlier form of the method, of which the log below tells; runs of the present form are "
            "missing."
        )
    return markdown(Table(head, tuple(map(_row, made)), tuple(notes)))


def _row(outcome: Outcome) -> tuple[str, ...]:
    name, sizes = described(outcome.system)
    behind, scores = outcome.shortfall, list(outcome.ours.values())
    own = _mean(scores) + (f" ± {points(stdev(scores))}" if len(scores) > 1 else "")
    own += f" ({outcome.diverged} diverged)" if outcome.diverged else ""
    return (
        *(name, sizes, own + (" \\*" if outcome.former else ""), _best(outcome)),
        "missing" if behind is None else points(behind) + _over(outcome.shared),
        *(points(max(tried)) if (tried := outcome.tried(method)) else "missing" for method in RIVALS),
        "missing" if outcome.printed is None else points(outcome.printed),
        _gaps(outcome),
    )


def _over(seeds: list[int]) -> str:
    return "" if seeds == list(SEEDS) else f" (seed {', '.join(map(str, seeds))})"


def _best(outcome: Outcome) -> str:
    best = outcome.best
    if best is None:
        return "missing"
    told, spent = len(best.scores), len(outcome.grid(best.method))
    beyond = len(outcome.grid(best.method, wider=True))
    mean_score, seeds = _mean(list(best.scores.values())), f"{told} seed{'s' if told > 1 else ''}"
    if not best.words:
        return f"{best.method} as printed, averaged: {mean_score} ({seeds})"
    asked = spent + outcome.missing.get(best.method, 0)
    setting = " / ".join(f"{value:g}" for value in best.words.values())
    runs = f"{spent} of {asked}" if spent < asked else spent
    runs = f"{runs} and {beyond} beyond" if beyond else f"{runs} runs"
    return f"{best.method} {setting}: {mean_score} ({seeds}; grid: {runs})"


def _gaps(outcome: Outcome) -> str:
    count = sum(outcome.missing.values())
    if not outcome.ours and not outcome.rivals and outcome.printed is None:
        return f"all {count}"
    names = {"wider": "beyond grids", "finals": "on other seeds"}
    told = ", ".join(f"{names.get(name, name)} {gap}" for name, gap in outcome.missing.items())
    return told or NONE


def _mean(scores: list[float]) -> str:
    return points(mean(scores)) if scores else "missing"


def figures(made: Sequence[Outcome]) -> dict[str, str]:
    """SVG by file name, one for each task that has a system with all runs."""
    return drawings(costs(made), FIGURES, PERCENT)


def cost(made: Sequence[Outcome]) -> str:
    """The figures, and the same as a table."""
    spent = costs(made)
    tasks = dict.fromkeys(each.column for each in spent if each.best)  # the others have no figure
    shown = [
        f"![{task}: accuracy by runs spent on a grid]({name})"
        for task, name in zip(tasks, figures(made), strict=True)
    ]
    table = cost_table(spent, points)
    meaning = (
        "Accuracy in % to expect of the best of so many settings of a method's grid, taken at random, and "
        "then of those beyond it, in the order in which they were tried; mean over the task's systems that "
        f"have all their grids, on seed {SEEDS[0]}. A run that diverged counts as guessing."
    )
    if any(outcome.former for outcome in made):
        meaning += f" Where {OURS[0]} has an asterisk above, its point here is of that earlier form, too."
    return "\n\n".join([" ".join(shown), markdown(table._replace(notes=(meaning, *table.notes[1:])))])


def sections(made: Sequence[Outcome], held: Sequence[Outcome]) -> dict[str, str]:
    """What stands after each marker."""
    return {
        SUMMARY: f"{summary(made)}\n\n{concurrency(made)}",
        HELD: systems(held),
        SYSTEMS: systems(made),
        COST: cost(made),
    }


def main() -> None:
    """Print it, or put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    found = recorded(RECORDS)
    made, held = outcomes(found), outcomes(found, HELD_OUT)
    if not parser.parse_args().write:
        print("\n\n".join(sections(made, held).values()))
        return
    PAGE.write_text(fill_sections(PAGE.read_text(), sections(made, held)))
    drawn = figures(made)
    for path in set(HERE.glob(f"{FIGURES}*.svg")) - {HERE / name for name in drawn}:
        path.unlink()
    for name, drawing in drawn.items():
        (HERE / name).write_text(drawing)


if __name__ == "__main__":
    main()
