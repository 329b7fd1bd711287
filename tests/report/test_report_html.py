import base64
import hashlib
import html
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from offbeat.errors import DivergedError, InputError
from offbeat.report import build
from offbeat.report.build import make_report
from offbeat.report.svg import png_converter
from report_world import change_settings, found, lines, make_run, make_unfinished_run, write_lines

VOID = {"meta", "link", "input"}
FETCHES = {"src", "srcset", "action", "formaction", "poster", "data", "xlink:href", "background", "style"}


class Tags(HTMLParser):
    """All elements; those that are opened have to be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some runs."""
    folder = tmp_path_factory.mktemp("page")
    make_run(folder / "one")
    make_run(folder / "two", algorithm="fadas", dropout=0.2, max_staleness=1)
    make_run(
        folder / "private", clip="0.5", noise=1.0, delta=1e-5, max_participations=8, clients=12, noise_seed=1
    )
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> list[Path]:
    return [shutil.copytree(made / name, tmp_path / name) for name in ("one", "two", "private")]


def report(runs: list[Path], **more: bool) -> str:
    return make_report(runs, runs[0].parent / "page.html", **more).page.read_text()


def test_a_browser_may_fetch_nothing_and_run_one_script(runs: list[Path]) -> None:
    page = report(runs)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy).split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["style-src"] == f"'sha256-{digest}'"
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules.keys() == {
        "default-src",
        "style-src",
        "script-src",
        "img-src",
        "base-uri",
        "form-action",
    }
    assert "url(" not in style
    assert "@import" not in style


def test_nothing_is_asked_of_anybody(runs: list[Path]) -> None:
    for tag, attributes in Tags(report(runs)).all:
        assert tag not in {"iframe", "img", "object", "embed", "base", "form"}
        assert not FETCHES & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
        assert tag != "script" or attributes in ({}, {"type": "application/json", "id": "records"})
        if "href" in attributes:
            assert re.fullmatch(r"data:,|page-files/[a-z-]+\.(svg|png|csv)", attributes["href"] or "")


def test_every_link_has_its_file_and_every_file_its_link(runs: list[Path]) -> None:
    page = report(runs, with_fairness=True)
    links = {
        attributes["href"] for _, attributes in Tags(page).all if "page-files" in str(attributes.get("href"))
    }
    files = {f"page-files/{name}" for name in found(runs[0].parent / "page-files")}
    assert links == files
    assert len(files) == 3 * 16


def test_names_from_outside_are_escaped(runs: list[Path]) -> None:
    evil = "<script>alert(1)</script>\"'&"
    other = runs[0].rename(runs[0].with_name("<img src=x onerror=alert(1)>"))
    change_settings(other, weights=evil, algorithm=evil, **{evil: evil})
    page = make_report([other, runs[1]], runs[1].parent / "page.html").page.read_text()
    tags = [tag for tag, _ in Tags(page).all]
    assert "img" not in tags
    assert tags.count("script") == 2  # the report's own script and its data
    assert page.count("</script>") == 2
    assert html.escape(evil) in page


def test_three_runs_are_small(runs: list[Path]) -> None:
    assert len(report(runs, with_fairness=True).encode()) < 500 * 1024


def test_long_runs_are_thinned_to_what_a_screen_shows(runs: list[Path]) -> None:
    for run in runs:
        (record, *_) = lines(run, "records")
        write_lines(run, "records", [record | {"version": n, "time": float(n)} for n in range(6_000)])
        (run / "trace.jsonl").unlink()
    assert len(report(runs).encode()) < 500 * 1024
    assert len((runs[0].parent / "page-files" / "loss-by-time.csv").read_text().splitlines()) == 18_001


def test_it_says_what_is_private_and_on_which_terms(runs: list[Path]) -> None:
    page = html.unescape(report(runs))
    assert "(epsilon, delta) = (" in page
    assert "No amplification: no client contributes more than 8 times" in page
    assert "Not private: one, two." in page


def test_an_epsilon_of_before_is_not_taken_for_all_that_was_spent(tmp_path: Path) -> None:
    folder = make_unfinished_run(
        tmp_path / "killed", 5, clip="0.5", noise=1.0, delta=1e-5, max_participations=8, noise_seed=1
    )
    page = html.unescape(report([folder]))
    (known,) = re.findall(r"\(epsilon, delta\) = \((\S+), 1e-05\) up to server step 4, and more", page)
    assert "since then: the run has not ended, and its checkpoint counts 5 releases" in page
    assert f"at least {known}" in page
    assert float(known) == pytest.approx(lines(folder, "records")[2]["epsilon"], rel=1e-3)
    assert "after 5 releases" not in page

    early = [record | {"epsilon": record["epsilon"] or None} for record in lines(folder, "records")[:1]]
    write_lines(folder, "records", [*early, *(r | {"epsilon": None} for r in lines(folder, "records")[1:])])
    page = html.unescape(report([folder]))
    assert "The privacy loss is not known: the run has not ended, and no record has an epsilon." in page
    assert "(epsilon, delta) = (" not in page
    assert "killed has no finite epsilon of a server step in its records." in page


def test_a_run_that_diverged_says_so_and_why(tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        make_run(tmp_path / "high", model="mlp", parameters=(("local_lr", 1e30),))
    page = html.unescape(report([tmp_path / "high"]))
    assert re.search(r"diverged: the (update|loss) .*became NaN or infinite at server step \d", page)
    change_settings(tmp_path / "high", simulate_amplification=True)  # nobody may learn who took part
    page = html.unescape(report([tmp_path / "high"]))
    assert "diverged" in page
    assert "became NaN" not in page
    (tmp_path / "high" / "failure.json").write_text("[")
    assert "diverged" not in report([tmp_path / "high"])


def test_a_page_that_tells_of_a_secret_sample_says_so(runs: list[Path]) -> None:
    change_settings(runs[2], simulate_amplification=True)
    made = make_report(runs, runs[0].parent / "page.html")
    assert made.secret == ("private",)
    assert "protect it like the run's folder" in html.unescape(made.page.read_text())


def test_it_says_which_settings_differ(runs: list[Path]) -> None:
    page = report(runs[:2])
    rows = re.findall(r'<tr class="differs"><th scope="row">≠ ([^<]*)</th>', page)
    assert {"method", "dropout", "max_staleness"} <= set(rows)
    assert "--clients" not in rows


def test_wasted_work_of_one_run_is_told_apart(runs: list[Path]) -> None:
    report(runs[1:2])
    table = (runs[0].parent / "page-files" / "wasted.csv").read_text()
    ends = dict(line.split(",", 1) for line in table.splitlines()[1:])
    trace = lines(runs[1], "trace")
    for name in ("dropped", "lost"):
        assert float(ends[name].split(",")[1]) == sum(len(line[name]) for line in trace)


def test_a_run_without_accuracy_and_trace_says_so(runs: list[Path]) -> None:
    run = runs[0]
    (run / "trace.jsonl").unlink()
    write_lines(run, "records", [{"version": 8, "time": 3.0, "client_updates": 24, "bytes": 12}])
    page = html.unescape(report([run]))
    assert "one has no accuracy in its records." in page
    assert "one has no trace of a server step." in page
    assert found(run.parent / "page-files") == {}


def test_old_records_without_bytes_say_so(runs: list[Path]) -> None:
    records = [
        {name: value for name, value in line.items() if name != "bytes"} for line in lines(runs[0], "records")
    ]
    write_lines(runs[0], "records", records)
    page = html.unescape(report(runs[:1]))
    assert "one has no bytes sent and received in its records." in page
    assert "accuracy-by-steps.svg" in page


def test_what_an_earlier_report_left_goes_and_what_is_not_ours_stays(runs: list[Path]) -> None:
    folder = runs[0].parent / "page-files"
    report(runs)
    (folder / "mine.svg").write_text("mine")
    assert (folder / "privacy.svg").exists()
    report(runs[:1])
    assert not (folder / "privacy.svg").exists()
    assert (folder / "mine.svg").read_text() == "mine"


def test_the_page_is_in_its_place_last(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("the disk is full")

    report(runs[:1])
    before = (runs[0].parent / "page.html").read_bytes()
    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="full"):
        report(runs)
    assert (runs[0].parent / "page.html").read_bytes() == before
    assert not [*runs[0].parent.rglob("*.part")]


def test_pictures_are_pngs(runs: list[Path]) -> None:
    if isinstance(png_converter(), str):
        pytest.skip(f"there is nothing to make a PNG with here: {png_converter()}")
    report(runs[:1])
    picture = (runs[0].parent / "page-files" / "staleness.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert int.from_bytes(picture[16:20], "big") == 1050


def test_without_a_converter_there_is_one_sentence_and_no_png(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    made = make_report(runs, runs[0].parent / "page.html")
    assert made.without_png is not None
    assert "pip install 'offbeat[report]'" in made.without_png
    assert not [*made.folder.glob("*.png")]
    assert "PNG</a>" not in made.page.read_text()


def test_there_is_a_name_for_every_figure(runs: list[Path]) -> None:
    figures = make_report(runs, runs[0].parent / "page.html", with_fairness=True).figures
    assert set(figures) == set(build.figure_names(["accuracy", "loss"])) - {"clients"}


@pytest.mark.parametrize("count", [0, 13])
def test_a_report_has_from_one_to_twelve_runs(runs: list[Path], count: int) -> None:
    with pytest.raises(InputError, match=r"needs a run|at most 12 runs, not 13"):
        make_report([runs[0]] * count, runs[0].parent / "page.html")
