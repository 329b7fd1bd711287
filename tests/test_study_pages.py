"""The pages of reproduced studies are made from their records, drawings included."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from offbeat.cli.main import main
from offbeat.reproduce.measures import LastModel, LastRounds, Measure, TimeTo
from offbeat.reproduce.page import figures, marker, section, written
from offbeat.reproduce.records import Curve, append, recorded
from offbeat.reproduce.studies import STUDIES
from offbeat.reproduce.study import Cell, Study, Version
from offbeat.reproduce.tabulate import Best, entries_of, whole_seeds

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


class Part(NamedTuple):
    """A table of a page."""

    study: Study
    version: Version
    found: dict[str, Curve]
    quick: bool

    @property
    def page(self) -> Path:
        return EXPERIMENTS / self.study.paper / "README.md"


def parts() -> list[Part]:
    """Every version of a study of which a run is recorded."""
    made = []
    for study in STUDIES.values():
        for name, version in (("full", study.full), ("quick", study.quick)):
            found = recorded(EXPERIMENTS / study.paper / "records" / f"{name}.jsonl")
            if found.keys() & {cell.key for cell in version.cells}:
                made.append(Part(study, version, found, name == "quick"))
    return made


PARTS = [pytest.param(part, id=f"{part.study.name}-{'quick' if part.quick else 'full'}") for part in parts()]


@pytest.mark.parametrize("part", PARTS)
def test_a_study_with_records_has_its_tables_in_its_page_and_nothing_else_between_markers(part: Part) -> None:
    page = part.page.read_text()
    text = section(part.study, part.version, part.found, part.quick)
    assert written(page, marker(part.study, part.quick), text) == page


def test_every_drawing_is_made_from_the_records_and_shown() -> None:
    made: dict[Path, str] = {}
    for part in parts():
        drawn = figures(part.study, part.version, part.found, part.quick)
        made |= {part.page.parent / name: drawing for name, drawing in drawn.items()}
    assert made
    for path, drawing in made.items():
        assert path.read_text() == drawing, f"{path.name} is not what the records give"
        assert f"({path.name})" in (path.parent / "README.md").read_text()
    folders = {path.parent for path in made}
    assert {path for folder in folders for path in folder.glob("*.svg")} == made.keys()


def test_markers_of_the_pages_are_those_of_studies() -> None:
    # where a folder has a script for more tables, test_experiments.py looks at its markers
    pages = {part.page for part in parts() if not (part.page.parent / "table.py").exists()}
    assert pages
    for page in pages:
        known = {
            marker(study, quick).strip()
            for study in STUDIES.values()
            if study.paper == page.parent.name
            for quick in (False, True)
        }
        assert set(re.findall(r"<!-- .+? -->", page.read_text())) - {"<!-- end -->"} <= known


def merits(name: str, measure: Measure = LastModel(), version: str = "quick") -> dict[tuple[str, str], float]:
    """The best figure of each row and column of a study, from its records."""
    cells, found = shown(name, version)
    return {place: entry.figure.merit for place, entry in entries_of(cells, found, measure).items()}


def shown(name: str, version: str) -> tuple[tuple[Cell, ...], dict[str, Curve]]:
    """The cells of the seeds that the page shows, and all records."""
    study = STUDIES[name]
    found = recorded(EXPERIMENTS / study.paper / "records" / f"{version}.jsonl")
    cells, _ = whole_seeds(getattr(study, version).cells, found)
    return cells, found


def test_what_the_page_on_adamasfl_says_holds() -> None:
    first = {row: merit for (row, _), merit in merits("adamasfl-fig1").items()}
    gaps = {row: round(merit - first["adamasfl"], 3) for row, merit in first.items() if row != "adamasfl"}
    assert min(gaps, key=gaps.__getitem__) == "masfl"
    assert max(gaps, key=gaps.__getitem__) == "fedbuff"
    assert (gaps["masfl"], gaps["fedbuff"]) == (0.006, 0.019)
    by_count = merits("adamasfl-fig2")
    counts = ("10", "20", "60", "90")
    spread = {row: [by_count[row, count] for count in counts] for row in first}
    images = 360  # in the test set
    assert round(images * (max(spread["adamasfl"]) - min(spread["adamasfl"]))) == 2
    falling = {row for row, each in spread.items() if each[0] - each[-1] > 0.099}
    assert falling == {"masfl", "ca2fl", "fadas", "fadas-da"}
    assert all(spread[row][-1] < spread["adamasfl"][-1] for row in falling)
    for row in ("defedavg", "fedbuff"):
        assert all(ours > theirs for ours, theirs in zip(spread[row], spread["adamasfl"], strict=True))


def test_what_the_page_on_padamfed_says_holds() -> None:
    first = merits("padamfed-fig1")
    for split in ("digits i.i.d.", "digits 2 shards"):
        order = sorted(
            ("padamfed-vr", "padamfed", "fedavg", "scaffold", "scaffold-m"), key=lambda row: first[row, split]
        )
        assert order[0] == "padamfed"
        assert order[-2:] == ["padamfed-vr", "scaffold"]
    change = {
        row: first[row, "digits 2 shards"] - first[row, "digits i.i.d."] for row in ("fedavg", "padamfed")
    }
    assert round(change["fedavg"], 3) == -0.017
    assert change["padamfed"] >= 0
    swept: dict[str, list[float]] = {}
    for (row, _), merit in merits("padamfed-fig2").items():
        swept.setdefault(row.removeprefix("digits 2 shards: "), []).append(merit)
    least = {row: min(each) for row, each in swept.items()}
    assert min(least["padamfed, local"], least["padamfed-vr, local"]) > 0.83
    assert max(least["fedavg, local"], least["scaffold, local"], least["scaffold-m, server"]) < 0.7
    assert max(least["padamfed, server"], least["padamfed-vr, server"]) < 0.3
    assert min(least, key=least.__getitem__) == "scaffold-m, server"


def test_what_the_page_says_of_padamfed_in_full_holds() -> None:
    best = merits("padamfed-fig1", version="full")
    cells, found = shown("padamfed-fig1", "full")
    ours, others = ("padamfed", "padamfed-vr"), ("fedavg", "scaffold", "scaffold-m")
    splits = {cell.column for cell in cells}
    gaps = {
        split: [best[row, split] - best[one, split] for row in others for one in ours] for split in splits
    }
    assert all(gap > 0 for each in gaps.values() for gap in each)
    digits = [gap for split, each in gaps.items() if split.startswith("MNIST") for gap in each]
    clothes = [gap for split, each in gaps.items() if split.startswith("Fashion") for gap in each]
    assert (round(min(digits), 2), round(max(digits), 2)) == (0.04, 0.06)
    assert (round(min(clothes), 2), round(max(clothes), 2)) == (0.01, 0.19)
    assert sum(best["padamfed-vr", split] < best["padamfed", split] for split in splits) == 3
    even, skewed = "Fashion-MNIST i.i.d.", "Fashion-MNIST 2 shards"
    lost = [round(best[row, even] - best[row, skewed], 3) for row in ("padamfed", *others)]
    assert lost == [0.001, 0.074, 0.116, 0.057]
    failed = [cell.row for cell in cells if found[cell.key].failure]
    assert (len(failed), failed.count("scaffold")) == (13, 8)
    assert not set(failed) & set(ours)
    curves = {(cell.row, cell.column): found[cell.key] for cell in cells if cell.row in ours}
    for split, gain in ((even, 0.016), (skewed, 0.014)):
        curve = curves["padamfed", split]
        late = curve.accuracies[-1] - curve.accuracies[curve.versions.index(300)]
        assert late == pytest.approx(gain, abs=5e-4)
    swings = [round(value, 3) for value in curves["padamfed-vr", skewed].accuracies[-5:]]
    assert swings == [0.656, 0.731, 0.728, 0.701, 0.671]


def test_what_the_page_on_fadas_says_holds() -> None:
    large, mild = merits("fadas-table2", LastRounds()), merits("fadas-table4", LastRounds())
    rows, columns = ("fedasync", "fedbuff", "fadas", "fadas-da"), ("Dir(0.1)", "Dir(0.3)")
    for table in (large, mild):
        values = [table[row, "Dir(0.1)"] for row in rows]
        assert values == sorted(values)
        assert table["fadas-da", "Dir(0.3)"] <= table["fadas", "Dir(0.3)"]
    gains = [round(table["fadas", c] - table["fedbuff", c], 2) for table in (large, mild) for c in columns]
    assert gains == [0.56, 0.11, 0.67, 0.06]
    for method in ("fadas", "fadas-da"):
        base = large[method, "Dir(0.1)"]
        assert abs(large[f"{method}, bias-corrected", "Dir(0.1)"] - base) < 0.3
        for variant in ("delta base", "both as in the scripts"):
            assert 1.1 < base - large[f"{method}, {variant}", "Dir(0.1)"] < 1.65
    assert large["fadas-da, tau_c 8", "Dir(0.1)"] > large["fadas-da", "Dir(0.1)"] - 0.51
    times = {row: -merit for (row, _), merit in merits("fadas-table7", TimeTo(0.9)).items()}
    assert sorted(times, key=times.__getitem__) == [
        "fadas-da",
        "fadas",
        "fedams, no floor",
        "fedavg",
        "fedams",
    ]
    assert 0.4 < times["fadas"] / times["fedavg"] < 0.6


def test_a_quick_version_is_recorded_in_whole() -> None:
    quick = [part for part in parts() if part.quick]
    assert quick
    for part in quick:
        assert {cell.key for cell in part.version.cells} <= part.found.keys(), part.study.name


def test_a_table_and_its_drawing_are_in_the_same_unit() -> None:
    seen = set()
    for part in parts():
        for drawing in figures(part.study, part.version, part.found, part.quick).values():
            assert isinstance(part.version.tabulate, Best)
            per_cent = isinstance(part.version.tabulate.measure, LastRounds)
            assert ("accuracy, %" in drawing) is per_cent
            (most, *_) = re.findall(r"<title>\S+: (\S+)( %)? at ", drawing)
            assert (float(most[0]) > 1) is per_cent
            assert bool(most[1]) is per_cent
            seen.add(per_cent)
    assert seen == {False, True}


def test_the_command_shows_the_cost_and_writes_its_table_and_drawings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = STUDIES["padamfed-fig1"]
    for place, cell in enumerate(study.quick.cells):
        empty = dict.fromkeys(("staleness_of_worst", "failure"))
        told = {"seconds": 1.0, "device": "CPU", "date": "2026-01-02"}
        score = {"version": [0], "time": [0.0], "accuracy": [0.5 + place / 100]}
        append(tmp_path / "quick.jsonl", {"key": cell.key} | empty | told | score)
    page = tmp_path / "page.md"
    page.write_text("<!-- padamfed-fig1 quick -->\n<!-- end -->\n")
    words = ["reproduce", "padamfed-fig1", "--quick", "--table", "--out", str(tmp_path), "--write", str(page)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    # the grid of fedavg is at places 2, 3 and 4
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "digits i.i.d.: fedavg 0.530 0.537 0.540 0.540 (3 runs)" in lines
    assert "digits i.i.d.: runs to expect as much as from one of padamfed: fedavg 1," in shown
    assert "| digits i.i.d.: fedavg | 0.530 | 0.537 | 0.540 | 0.540 (3 runs) |" in page.read_text()
    drawn = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert drawn == ["padamfed-fig1-quick-cost-1.svg", "padamfed-fig1-quick-cost-2.svg"]
    assert all(f"({name})" in page.read_text() for name in drawn)

    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert ["digits i.i.d.: fedavg", "0.530", "0.537", "0.540", "0.540 (3 runs)"] in facts["cost"]["rows"]


def test_a_page_without_markers_gets_no_drawings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    out = str(EXPERIMENTS / "adamasfl" / "records")
    words = ["reproduce", "adamasfl-fig1", "--quick", "--table", "--out", out, "--write", str(page)]
    assert main(words) == 2
    assert "must have one line" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_what_the_guide_says_of_synchronous_methods_holds() -> None:
    best = merits("padamfed-fig1", version="full")
    for split in {column for _, column in best}:
        assert best["fedavg", split] > best["scaffold", split]
        assert best["fedavg", split] > max(best["padamfed", split], best["padamfed-vr", split]) + 0.045
