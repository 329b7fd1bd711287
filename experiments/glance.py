"""What the papers claim beside what was measured: a table for the top of each page, and one picture of all.

Every claim becomes one or more points: by how much the claim holds, in points of accuracy or in per cent of
steps or time saved, beside the same figure in the paper where it has one. Points right of 0 agree with the
claim; where the paper has the figure itself, a point is the difference from it.
`python -m experiments.glance` prints the tables from the records, and `--write` puts them into the pages and
draws `docs/claims.svg`.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from experiments.momentum import table4
from experiments.reproduce.claims_figure import PAPERS, Claim, Point, draw
from experiments.reproduce.page import markdown_table, written
from experiments.reproduce.records import Curve, recorded
from experiments.reproduce.study import Cell, Study, Version
from experiments.reproduce.tables import Best, Swept, entries_of, whole_seeds
from experiments.studies import (
    adamasfl,
    fadas,
    fadas_authors,
    fadas_fig1,
    language,
    momentum,
    momentum_gap,
    padamfed,
)
from experiments.studies.map_table import CLOSE

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "claims.svg"
MARKER = "<!-- glance -->\n"
HEAD = ("claimed", "measured", "agrees, and why")
NEAR = 3.0  # points within which a figure is the paper's, unless the paper's own deviation is larger
STARTED = "2"  # tasks started for each one used, where Table 4 of momentum approximation is compared

Places = Mapping[tuple[str, str], float]


def claims() -> tuple[Claim, ...]:
    """All claims, paper by paper, from the records."""
    return (
        *_of_adamasfl(),
        *_of_authors(),
        *_of_fadas(),
        *_of_ablations(),
        *_of_language(),
        *_of_momentum(),
        *_of_padamfed(),
    )


def _merits(study: Study, quick: bool = False) -> Places:
    """The best figure of each row and column."""
    version, found = _found(study, quick)
    assert isinstance(version.tabulate, Best | Swept)
    cells, _ = whole_seeds(version.cells, found)
    entries = entries_of(cells, found, version.tabulate.measure)
    return {place: entry.figure.merit for place, entry in entries.items()}


def _found(study: Study, quick: bool = False) -> tuple[Version, dict[str, Curve]]:
    name = "quick" if quick else "full"
    return study.quick if quick else study.full, recorded(HERE / study.paper / "records" / f"{name}.jsonl")


def _figure(text: str | None) -> tuple[float, float] | None:
    """A figure of a paper and its deviation; None where there is none, or a digit is lost."""
    try:
        value, _, deviation = (text or "?").partition(" ± ")
        return float(value), float(deviation or 0)
    except ValueError:
        return None


def _ahead(
    case: str,
    winner: str,
    others: Sequence[str],
    column: str,
    merits: Places,
    claimed: Mapping[tuple[str, str], str],
    scale: float = 1.0,
) -> Point | None:
    """How far a row is ahead of the best of others, measured and claimed."""
    if any((row, column) not in merits for row in (winner, *others)):
        return None
    margin = scale * (merits[winner, column] - max(merits[row, column] for row in others))
    told = [_figure(claimed.get((row, column))) for row in (winner, *others)]
    known = [each[0] for each in told if each is not None]
    by = known[0] - max(known[1:]) if len(known) == len(told) else None
    return Point(case, margin, by, margin > 0)


def _saved(own: float, other: float) -> float:
    """Per cent of time or steps."""
    return 100 * (1 - own / other)


def _of_adamasfl() -> tuple[Claim, ...]:
    first = _merits(adamasfl.FIG1)
    column = next(column for _, column in first)
    others = [row for row, _ in first if row != "adamasfl"]
    best = 100 * (first["adamasfl", column] - max(first[row, column] for row in others))
    second = _merits(adamasfl.FIG2)
    change = {row: second[row, "90"] - second[row, "10"] for row, column in second if column == "10"}
    flat = 100 * (change["adamasfl"] - max(change[row] for row in others))
    mapped = adamasfl.QUICK_MAP
    found = _found(adamasfl.MAP, quick=True)[1]
    places = [one for place in mapped.places if (one := mapped.measured(place, found)) is not None]
    above = max(places, key=lambda one: one.margin(one.middle))
    swept = [one for one in places if one.swept and one.place.cohort <= CLOSE]  # where delays grow
    steadier = {
        one.place: one.change(one.printed) - max(map(one.change, one.swept.values())) for one in swept
    }
    steady = max(steadier, key=steadier.__getitem__)
    margin, kept = 100 * above.margin(above.middle), 100 * steadier[steady]
    return (
        Claim(
            "adamasfl",
            "Fig. 1: AdaMasFL at its theorem's rates is above all methods tuned by grid",
            "points",
            (Point("margin over the best tuned method, Fashion-MNIST", best, agrees=best > 0),),
            "its path is bounded by (SKT)^(1/4), whatever the scale of the weights, as the map below "
            "confirms where delays are short; S, K and T are not told",
        ),
        Claim(
            "adamasfl",
            "Fig. 2: from 10 to 90 clients at work it stays nearly flat, and the others fall",
            "points",
            (Point("margin over the steadiest other, Fashion-MNIST", flat, agrees=flat > 0),),
            "DeFedAvg loses less; AdaMasFL finishes every run, and MasFL, FedBuff and CA2FL do not",
        ),
        Claim(
            "adamasfl",
            f"Figs 1 and 2 at the best of {len(places)} places over S, K, T and the split, with a small MLP",
            "points",
            (
                Point(f"margin over the best tuned method, {above.place.title}", margin, agrees=margin > 0),
                Point(f"margin over the steadier of two, {steady.title}", kept, agrees=kept > 0),
            ),
            "delays of many versions unsettle its unit steps; where they are few its path is too short, and "
            "ten times the rates come near the tuned methods",
        ),
    )


def _of_fadas() -> tuple[Claim, ...]:
    made = []
    for study, name, why in (
        (fadas.TABLE2, "Table 2", "less than claimed: GroupNorm, half the local work and no augmentation"),
        (
            fadas.TABLE4,
            "Table 4",
            "level under mild delays, with a smaller model and two rates for each method",
        ),
    ):
        merits, best = _merits(study), study.full.tabulate
        assert isinstance(best, Best)
        columns = list(dict.fromkeys(column for row, column in merits if row == "fadas"))
        for winner, other, reason in (
            ("fadas", "fedbuff", why),
            ("fadas-da", "fadas", "ten times the server rate, and nearly every step is shortened"),
        ):
            points = (_ahead(c, winner, [other], c, merits, best.claimed) for c in columns)
            words = f"{name}: {_named(winner)} is above {_named(other)}"
            made.append(Claim("fadas", words, "points", tuple(p for p in points if p), reason))
    merits, best = _merits(fadas.TABLE2), fadas.TABLE2.full.tabulate
    assert isinstance(best, Best)
    made.append(
        Claim(
            "fadas",
            "Table 2: the accuracies with ResNet-18",
            "points from the paper's",
            _levels(merits, best.claimed),
            "GroupNorm for BatchNorm costs 28 points in the corners, half the local work 14 after half of "
            "the rounds",
        )
    )
    version, found = _found(fadas.TABLE2)
    note = version.tabulate(version.cells, found).notes[-1]
    same = f"claimed {best.delays}, measured {best.delays}." in note
    made.append(
        Claim(
            "fadas",
            f"Table 2: staleness of each buffer's stalest update, {best.delays} (largest / mean / median)",
            "from the paper's",
            (Point("largest, mean and median", 0.0 if same else math.inf, 0.0, same),),
            "the schedule and the draws are those of the authors' scripts",
        )
    )
    times, best = _merits(fadas.TABLE7), fadas.TABLE7.full.tabulate
    assert isinstance(best, Best)
    points = []
    for winner, other in (("fadas", "fedams"), ("fadas-da", "fedams"), ("fedams", "fedavg")):
        column = next(column for row, column in times if row == winner)
        own, theirs = -times[winner, column], -times[other, column]
        told = [_figure(best.claimed.get((row, column))) for row in (winner, other)]
        by = _saved(told[0][0], told[1][0]) if told[0] and told[1] else None
        saved = _saved(own, theirs) if math.isfinite(own) else -math.inf
        points.append(Point(f"{_named(winner)} before {_named(other)}", saved, by, saved > 0))
    made.append(
        Claim(
            "fadas",
            "Table 7: virtual time to an accuracy",
            "% of time saved",
            tuple(points),
            "to 50 % with the smaller model here, to 75 % there",
        )
    )
    return tuple(made)


_AUTHORS_ORDER = (  # who is claimed to be above whom, and what there is to say of it
    ("fadas", "fedbuff", "the setting of the paper and of its scripts, one seed"),
    ("fadas-da", "fadas", "the setting of the paper and of its scripts, one seed"),
)


def _of_authors() -> tuple[Claim, ...]:
    """Table 2 of FADAS as its authors ran it, as far as it is recorded."""
    merits, best = _merits(fadas_authors.TABLE2), fadas_authors.TABLE2.full.tabulate
    assert isinstance(best, Best)
    columns = list(dict.fromkeys(column for _, column in best.claimed))
    made = []
    for winner, other, why in _AUTHORS_ORDER:
        points = (_ahead(c, winner, [other], c, merits, best.claimed) for c in columns)
        words = f"Table 2, as the authors ran it: {_named(winner)} is above {_named(other)}"
        made.append(Claim("fadas", words, "points", tuple(p for p in points if p), why))
    words = "Table 2, as the authors ran it: the accuracies"
    unit, why = "points from the paper's", "one run each, and deviations are of its last five rounds"
    made.append(Claim("fadas", words, unit, _levels(merits, best.claimed), why))
    return tuple(claim for claim in made if claim.points)


def _levels(merits: Places, claimed: Mapping[tuple[str, str], str]) -> tuple[Point, ...]:
    """How far accuracies are from the paper's, which are matched within its own deviation or `NEAR`."""
    levels = []
    for (row, column), text in claimed.items():
        told, own = _figure(text), merits.get((row, column))
        if told is not None and own is not None:
            gap = own - told[0]
            levels.append(Point(f"{_named(row)}, {column}", gap, 0.0, abs(gap) <= max(NEAR, told[1])))
    return tuple(levels)


def _of_ablations() -> tuple[Claim, ...]:
    version, found = _found(fadas_fig1.FIG1)
    ablations = version.tabulate
    assert isinstance(ablations, fadas_fig1.Ablations)
    groups: dict[fadas_fig1.SettingKey, list[Cell]] = {}
    for cell in version.cells:
        groups.setdefault(fadas_fig1.place_of(cell), []).append(cell)
    merit: dict[tuple[str, str], float] = {}
    for line in ablations.lines():
        for method in fadas_fig1.METHODS:
            place = line.place(method)
            if place is not None and place in groups:
                merit[line.name, method] = line.measure([found[cell.key] for cell in groups[place]]).merit
    points, timed = [], []
    for claim in ablations.claims():
        order = _claimed_order(claim)
        values = [merit[name] for name in order]
        if claim.words.endswith("first"):
            own, others = -values[0], -max(values[1:])
            saved = _saved(own, others)
            timed.append(Point(_case(claim), saved, None, saved > 0))
            continue
        chain = len(order) == len(fadas_fig1.BUFFERS)
        pairs = pairwise(values) if chain else ((values[0], max(values[1:])),)
        margin = min((a - b if math.isfinite(a) else -math.inf) for a, b in pairs)
        points.append(Point(_case(claim), margin, None, margin > 0))
    why = "rates were fixed when one thing was varied, and the adaptive form has ten times FADAS's"
    return (
        Claim(
            "fadas",
            "Fig. 1: the orders by threshold, clients at work and buffer",
            "points",
            tuple(points),
            why,
        ),
        Claim(
            "fadas",
            "Fig. 1: a buffer of 3 reaches an accuracy first",
            "% of time saved",
            tuple(timed),
            "accuracy was taken every ten rounds",
        ),
    )


def _case(claim: fadas_fig1.PaperClaim) -> str:
    method, comma, rest = claim.what.partition(",")
    return f"{_named(method)}{comma}{rest}: {claim.words}"


def _claimed_order(claim: fadas_fig1.PaperClaim) -> list[tuple[str, str]]:
    """The figures of a claim with the one that is claimed to be the best first."""
    named = list(claim.figures)
    if claim.what == "threshold":
        return sorted(named, key=lambda name: name[0] != "tau_c 8")
    if claim.what.startswith("M_c"):
        return sorted(named, key=lambda name: name[1] != claim.words.partition(" ")[0])
    return named if claim.words.endswith("first") else named[::-1]


def _of_language() -> tuple[Claim, ...]:
    merits, best = _merits(language.GLUE, quick=True), language.GLUE.quick.tabulate
    assert isinstance(best, Best)
    columns = dict.fromkeys(column for _, column in merits)
    points = (_ahead(c, "fadas", ["fedbuff", "fedasync"], c, merits, best.claimed) for c in columns)
    return (
        Claim(
            "language",
            "BERT with adapters on GLUE: FADAS is above FedBuff and FedAsync",
            "points",
            tuple(point for point in points if point),
            "a small BERT from random weights; from one that was pretrained here for 20 minutes no method "
            "learns enough to compare, and with the weights of BERT it was not run",
        ),
    )


def _of_momentum() -> tuple[Claim, ...]:
    laws = json.loads(table4.RECORDS.read_text())["laws"]
    order, errors = [], []
    for law, (full, light) in table4.PAPER.items():
        own = laws[law][STARTED]
        a, b, naive = (100 * own[name] for name in ("approximation", "light", "naive"))
        order.append(Point(f"{law}, K = {STARTED} C", b - a, light - full, a < b < naive))
        for name, measured, told in (("MA", a, full), ("MA-light", b, light)):
            errors.append(Point(f"{name}, {law}", measured - told, 0.0, abs(measured - told) <= NEAR))
    shrinks, nearer = _gaps()
    return (
        Claim(
            "momentum",
            "Table 1: the gap to synchronous rounds shrinks from C = 50 to 400",
            "points of relative gap",
            shrinks,
            "with a small MLP and Fashion-MNIST; most gaps are smaller than the paper's",
        ),
        Claim(
            "momentum",
            "Table 1: the gap of MA is smaller than that of MA-light, except for FedAdam with C = 400",
            "points of relative gap",
            nearer,
            "over three seeds MA is ahead beyond chance in one row and behind in three, where C is small",
        ),
        Claim(
            "momentum",
            "Table 4: MA comes nearer to momentum than MA-light, which comes nearer than naive momentum",
            "points of relative error",
            tuple(order),
            "MA solves for all past versions at once",
        ),
        Claim(
            "momentum",
            "Table 4: the relative errors of MA and MA-light",
            "points from the paper's",
            tuple(errors),
            "the paper names neither its delays nor its solver; no number of started tasks gives all six",
        ),
        Claim(
            "momentum",
            "Table 2: MA needs fewer server steps to the best accuracy of tuned FedBuff",
            "% of steps saved",
            _speed(momentum.TABLE2),
            "20 updates a step for the paper's 200, 300 to 400 rounds for 2,000 and 5,000, and other data; "
            "FedBuff is best at a beta of -0.5 here",
        ),
        Claim(
            "momentum",
            "Table 2 at the paper's 200 updates a step and 2,000 rounds, with a small MLP",
            "% of steps saved",
            _speed(momentum.SCALE, quick=True),
            "stale updates are scaled down, so that FedBuff needs twice MA's rate for steps of the same "
            "length; with these it comes as high, and with noise sooner",
        ),
    )


def _gaps() -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """How much the gap to synchronous rounds shrinks over C, and how much smaller MA's is than MA-light's."""
    version, found = _found(momentum_gap.TABLE1, quick=True)
    known = {(gap.rule, gap.cohort): gap for gap in momentum_gap.gaps(version.cells, found)}
    told, (least, *_, most) = momentum_gap.CLAIMED, momentum_gap.COHORTS
    shrinks = []
    for rule in momentum.RULES:
        for place, method in enumerate(momentum_gap.METHODS):
            less = known[rule, least].relative(method) - known[rule, most].relative(method)
            claimed = told[rule, least][place] - told[rule, most][place]
            shrinks.append(Point(f"{rule}, {method}", less, claimed, less > 0))
    nearer = []
    for (rule, cohort), gap in known.items():
        full, light = (gap.relative(method) for method in momentum_gap.METHODS)
        claimed = told[rule, cohort][1] - told[rule, cohort][0]
        if claimed > 0:
            nearer.append(Point(f"{rule}, C = {cohort}", light - full, claimed, light > full))
    return tuple(shrinks), tuple(nearer)


def _speed(study: Study, quick: bool = False) -> tuple[Point, ...]:
    """What MA saves in each group, beside the smaller of the paper's two figures."""
    version, found = _found(study, quick)
    points = []
    for row, _, _, ratios, *told, _, _ in momentum.speed_ups(version.cells, found).rows:
        claimed = min(float(text.partition(" / ")[0]) for text in told)
        own = _figure(ratios.partition(" / ")[0])
        saved = -math.inf if own is None else _saved(1.0, own[0])
        points.append(Point(row, saved, _saved(1.0, claimed), saved > 0))
    return tuple(points)


def _of_padamfed() -> tuple[Claim, ...]:
    first = _merits(padamfed.FIG1)
    columns = list(dict.fromkeys(column for _, column in first))
    tuned = ["fedavg", "scaffold", "scaffold-m"]
    best = [_ahead(c, "padamfed", tuned, c, first, {}, 100) for c in columns]
    reduced = [_ahead(c, "padamfed-vr", ["padamfed"], c, first, {}, 100) for c in columns]
    swept = padamfed.FIG2.full.tabulate
    assert isinstance(swept, Swept)
    second, steps = _merits(padamfed.FIG2), swept.among
    robust = []
    for split in padamfed.SPLITS:
        for method in ("padamfed", "padamfed-vr"):
            bound = float(swept.claimed[f"{split.title}: {method}, server"].removeprefix("above "))
            least = max(
                min(second[f"{split.title}: {method}, {rate}", step] for step in steps)
                for rate in ("server", "local")
            )
            gap = 100 * (least - bound)
            robust.append(Point(f"{_named(method)}, {split.title}", gap, None, gap > 0))
    return (
        Claim(
            "padamfed",
            "Fig. 1: PAdaMFed at its theorem's rates is above FedAvg, SCAFFOLD and SCAFFOLD-M tuned by grid",
            "points",
            tuple(point for point in best if point),
            "a round moves the model by 0.035 at most, and it has not arrived after 400",
        ),
        Claim(
            "padamfed",
            "Fig. 1: PAdaMFed-VR is above PAdaMFed",
            "points",
            tuple(point for point in reduced if point),
            "its steps are longer and never get shorter, so it does not come to rest",
        ),
        Claim(
            "padamfed",
            "Fig. 2: above 0.8 (i.i.d.) and 0.7 (not) for every step size from 0.003 to 0.1",
            "points above that, of the better of the two rates that may be meant",
            tuple(robust),
            "PAdaMFed hardly depends on its local rate; PAdaMFed-VR learns at one local rate alone",
        ),
    )


def _named(method: str) -> str:
    known = {
        "fadas": "FADAS",
        "fadas-da": "delay-adaptive FADAS",
        "fedbuff": "FedBuff",
        "fedasync": "FedAsync",
        "fedams": "FedAMS",
        "fedavg": "FedAvg",
        "padamfed": "PAdaMFed",
        "padamfed-vr": "PAdaMFed-VR",
    }
    return known.get(method, method)


def table(paper: str, every: Iterable[Claim]) -> str:
    """The claims of one page: claimed, measured, and whether and why."""
    rows = []
    for claim in every:
        if claim.paper == paper:
            told = [point.claimed for point in claim.points]
            texts = ["not told" if each is None else f"{each:+.1f}" for each in told]
            by = f": {', '.join(texts)} {claim.unit}" if any(told) else ""
            measured = "; ".join(f"{point.case} {_number(point.measured)}" for point in claim.points)
            rows.append((claim.words + by, f"{measured} ({claim.unit})", f"**{claim.verdict}**: {claim.why}"))
    return markdown_table(HEAD, rows)


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{value:+.1f}"
    return "diverged or not reached" if value < 0 else "the others diverged"


def pages(every: Sequence[Claim], read: Callable[[Path], str] = Path.read_text) -> dict[Path, str]:
    """The pages with their tables."""
    made = {}
    for paper in PAPERS:
        path = HERE / paper / "README.md"
        made[path] = written(read(path), MARKER, table(paper, every))
    return made


def main() -> None:
    """Print the tables, or write them and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages, and draw")
    every = claims()
    if not parser.parse_args().write:
        for paper, title in PAPERS.items():
            print(f"{title}\n\n{table(paper, every)}\n")
        return
    for path, text in pages(every).items():
        path.write_text(text)
    PICTURE.write_text(draw(every))


if __name__ == "__main__":
    main()
