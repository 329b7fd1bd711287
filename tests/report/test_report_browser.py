"""The report in a real browser, driven over a pipe.

The browser is the Chromium or Chrome that is found on the PATH; OFFBEAT_CHROMIUM names another one.
"""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from offbeat.report.build import make_report
from report_world import change_settings, make_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("OFFBEAT_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason=f"needs a browser: none of {', '.join(BROWSERS)} is on the PATH"),
]

# Boxes of all names that are to be seen, one list a drawing.
NAMES = """[...document.querySelectorAll(".card svg")].filter(each => each.getClientRects().length).map(
  each => [...each.querySelectorAll("text.name")].map(name => {
    const box = name.getBoundingClientRect(), own = each.getBoundingClientRect();
    return [box.top, box.bottom, box.right, own.right];
  }))"""
OVER = """[...document.querySelectorAll(".over")].filter(each => each.getClientRects().length).map(
  each => each.className)"""


class Tab:
    """One page of a browser."""

    def __init__(self, down: int, up: int) -> None:
        self._down, self._up = down, os.fdopen(up, "rb")
        self._rest = b""
        self._count = 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        call = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            call["sessionId"] = self._session
        os.write(self._down, json.dumps(call).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, page: Path, width: int, scheme: str) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=page.as_uri())
        while not any(each.get("method") == "Page.loadEventFired" for each in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def named(self, *methods: str) -> list[dict[str, Any]]:
        return [each["params"] for each in self.events if each.get("method") in methods]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._up.fileno(), 1 << 16)
            assert piece, "the browser is gone"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer


@contextmanager
def browser(home: Path) -> Iterator[Tab]:
    reads, down = os.pipe()
    up, writes = os.pipe()
    words = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
    ]
    words += ["--disable-background-networking", f"--user-data-dir={home}", "--remote-debugging-pipe"]
    # it reads from 3 and writes to 4
    shell = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *words]
    process = subprocess.Popen(
        shell, pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(reads)
    os.close(writes)
    try:
        tab = Tab(down, up)
        yield tab
        tab._up.close()
    finally:
        os.close(down)
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    make_run(folder / "one")
    make_run(folder / "a run with quite a long name", algorithm="fadas", dropout=0.2, max_staleness=1)
    make_run(folder / "private", clip="0.5", noise=1.0, delta=1e-5, max_participations=8, noise_seed=1)
    runs = [folder / name for name in ("one", "a run with quite a long name", "private")]
    return make_report(runs, folder / "page.html", with_fairness=True).page


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("home")) as tab:
        yield tab


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_reads_well(tab: Tab, page: Path, width: int, scheme: str) -> None:
    tab.events.clear()
    tab.open(page, width, scheme)
    assert tab.value("document.documentElement.scrollWidth") <= width
    drawings = tab.value(NAMES)
    assert sum(map(len, drawings)) > 12
    for names in drawings:
        boxes = sorted(names)
        for (_, bottom, *_), (top, *_) in pairwise(boxes):
            assert top >= bottom - 3  # boxes are taller than letters
        assert all(right <= edge + 1 for *_, right, edge in boxes)
    ground = [
        int(each) for each in tab.value("getComputedStyle(document.body).backgroundColor")[4:-1].split(",")
    ]
    assert (sum(ground) > 600) == (scheme == "light")
    assert tab.named("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded") == []
    asked = [each["request"]["url"] for each in tab.named("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    shot = base64.b64decode(tab.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"])
    assert shot.startswith(b"\x89PNG")


def test_the_axis_can_be_chosen_without_any_script(tab: Tab, page: Path) -> None:
    tab.events.clear()
    tab.open(page, 1280, "light")
    assert tab.value(OVER) == ["card over over-steps"] * 2
    tab.value("document.querySelector('[for=over-bytes]').click()")
    assert tab.value(OVER) == ["card over over-bytes"] * 2


def test_all_of_it_is_printed(tab: Tab, page: Path) -> None:
    tab.events.clear()
    tab.open(page, 1280, "dark")
    tab.ask("Emulation.setEmulatedMedia", media="print")
    assert len(tab.value(OVER)) == 8
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    paper = base64.b64decode(tab.ask("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])
    assert paper.startswith(b"%PDF")


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of twelve runs, in a folder whose name takes some care in an address."""
    folder = tmp_path_factory.mktemp("crowd")
    made = make_run(folder / "made", partition="dirichlet:0.3")
    runs = [shutil.copytree(made, folder / f"fedbuff-of-buffer-{number}") for number in range(12)]
    for number, run in enumerate(runs):
        change_settings(run, seed=number, local_lr=0.00123 * number, data_dir=f"/home/somebody/data/{number}")
    return make_report(runs, folder / "a#b?c%41.html").page


@pytest.mark.parametrize("width", [718, 1112])
def test_the_tables_of_twelve_runs_fit_on_paper(tab: Tab, crowd: Path, width: int) -> None:
    tab.events.clear()
    tab.open(crowd, width, "light")
    tab.ask("Emulation.setEmulatedMedia", media="print")
    assert tab.value("document.documentElement.scrollWidth") <= width
    # a pixel is what rounding may take
    assert tab.value(
        "[...document.querySelectorAll('th, td')].every(e => e.scrollWidth <= e.clientWidth + 1)"
    )
    assert tab.value("document.querySelectorAll('td').length") > 12 * 30


def test_links_of_a_page_with_an_odd_name_are_alive(tab: Tab, crowd: Path) -> None:
    tab.events.clear()
    tab.open(crowd, 1280, "light")
    links = tab.value("[...document.querySelectorAll('a[download]')].map(each => each.href)")
    files = crowd.with_name("a#b?c%41-files").iterdir()
    assert sorted(links) == sorted(file.as_uri() for file in files)


VISIBLE = """[...document.querySelectorAll("%s")].filter(each => each.getClientRects().length).length"""


@pytest.mark.parametrize("scripts", [True, False])
def test_runs_can_be_hidden_with_and_without_scripts(tab: Tab, page: Path, scripts: bool) -> None:
    tab.events.clear()
    tab.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
    tab.open(page, 1280, "light")
    before = {number: tab.value(VISIBLE % f".r{number}") for number in range(3)}
    assert min(before.values()) > 20
    assert tab.value("document.getElementById('explore').hidden") is not scripts
    tab.value("document.getElementById('run-1').click()")
    assert tab.value(VISIBLE % ".r1") == 0
    assert tab.value(VISIBLE % ".r0") == before[0]
    tab.value("document.getElementById('run-1').click()")
    assert tab.value(VISIBLE % ".r1") == before[1]
    tab.ask("Emulation.setScriptExecutionDisabled", value=False)


EXPLORED = """[...document.querySelectorAll("#explore-plot .line")].map(each => each.dataset.run)"""
CHOOSE = """(([id, label]) => { const box = document.getElementById(id);
  box.value = [...box.options].find(each => each.textContent === label).value;
  box.dispatchEvent(new Event("change", {bubbles: true})); })(%s)"""


@pytest.mark.parametrize("width", [1280, 400])
def test_axes_can_be_chosen_and_follow_the_chosen_runs(tab: Tab, page: Path, width: int) -> None:
    tab.events.clear()
    tab.open(page, width, "dark")
    assert len(tab.value(EXPLORED)) == 3
    texts = "[...document.querySelectorAll('#explore-plot text')].map(each => each.textContent)"
    assert {"accuracy", "server steps"} <= set(tab.value(texts))
    paths = "[...document.querySelectorAll('#explore-plot .line')].map(each => each.getAttribute('d'))"
    before = tab.value(paths)
    tab.value(CHOOSE % json.dumps(["explore-x", "virtual time"]))
    tab.value(CHOOSE % json.dumps(["explore-y", "epsilon"]))
    assert tab.value(EXPLORED) == ["private"]
    assert "epsilon" in tab.value(texts)
    tab.value(CHOOSE % json.dumps(["explore-y", "loss"]))
    tab.value("document.getElementById('run-0').click()")
    assert "one" not in tab.value(EXPLORED)
    assert len(tab.value(EXPLORED)) == 2
    assert tab.value(paths) != before
    tab.value("document.getElementById('explore-log').click()")
    assert tab.named("Runtime.exceptionThrown", "Log.entryAdded") == []
    assert tab.value("document.documentElement.scrollWidth") <= width
    bounds = tab.value(
        "[...document.querySelectorAll('#explore-plot .line')].flatMap(each => each.getAttribute('d')"
        ".slice(1).split('L').map(pair => Number(pair.split(',')[1])))"
    )
    assert bounds
    assert all(25 <= y <= 371 for y in bounds)


def test_the_script_draws_what_the_records_say(tab: Tab, page: Path) -> None:
    """The first and last points of a line lie at the ends of the axis, and values in proportion."""
    tab.events.clear()
    tab.open(page, 1280, "light")
    for number in (1, 2):
        tab.value(f"document.getElementById('run-{number}').click()")
    tab.value("document.getElementById('explore-zoom').click()")
    (path,) = tab.value("[...document.querySelectorAll('#explore-plot .line')].map(e => e.getAttribute('d'))")
    drawn = [tuple(map(float, pair.split(","))) for pair in path.removeprefix("M").split("L")]
    recorded = [json.loads(text) for text in (page.parent / "one" / "records.jsonl").read_text().splitlines()]
    steps = [record["version"] for record in recorded]
    scores = [record["accuracy"] for record in recorded]
    low, high = min(scores), max(scores)
    for (x, y), step, score in zip(drawn, steps, scores, strict=True):
        assert x == pytest.approx(70 + 755 * (step - steps[0]) / (steps[-1] - steps[0]), abs=0.06)
        assert y == pytest.approx(370 - 344 * (score - low) / (high - low), abs=0.1)
