"""The table of the fault campaign is what its records hold, and these say that nothing was lost."""

import re
from pathlib import Path

from experiments.faults import table

FOLDER = Path(__file__).parent.parent.parent / "experiments" / "faults"
LINES = table.load()
PAGE = table.PAGE.read_text()


def test_the_guide_shows_the_table_of_the_records() -> None:
    made = table.table(LINES)
    assert table.written(PAGE, made) == PAGE
    assert table.written(PAGE, made.replace("SIGKILL", "SIGHUP", 1)) != PAGE


def test_no_harm_to_a_file_was_silent_or_cost_an_accepted_upload() -> None:
    lines = table.load_files()
    assert table.written(PAGE, table.file_table(lines), "harmed files") == PAGE
    assert {line["kind"].rpartition(" ")[2] for line in lines} == {"deleted", "emptied", "cut", "flipped"}
    names = {line["kind"].rpartition(" ")[0] for line in lines}
    assert {"settings.json", "roster.json", "trace.jsonl", "records.jsonl", "journal/*.upload"} <= names
    assert {"journal/kept.jsonl", "journal/run", "checkpoint/state.safetensors"} <= names
    for line in lines:
        assert not line["bad"], line
        assert line["same"]
        assert line["lost"] == 0
    refused = {line["kind"] for line in lines if line["seen"].startswith("refused in one sentence")}
    for harm in ("deleted", "emptied", "cut", "flipped"):
        assert f"journal/*.upload {harm}" in refused  # of one that waited in the buffer


def test_no_accepted_upload_was_lost_and_no_bad_one_accepted() -> None:
    faults = [line for line in LINES if "kind" in line]
    runs = [line["verdict"] for line in LINES if "verdict" in line]
    assert len(faults) >= 100
    assert not [fault for fault in faults if fault["bad"]]
    for run in runs:
        assert run["missing"] == []
        assert run["used_twice"] == 0
        assert run["model"]
        assert run["steps"] == run["asked"]
        assert run["same"]
        assert run["remains"] == []


def test_the_same_holds_for_sites_in_one_process() -> None:
    name = "fault campaign, sites in one process"
    lines = table.load(table.TABLES[name])
    assert table.written(PAGE, table.table(lines), name) == PAGE
    faults = [line for line in lines if "kind" in line]
    assert not [
        fault for fault in faults if fault["bad"] or fault["seen"].startswith(("nothing", "the campaign"))
    ]
    assert {"a full disk", "200 silent connections", "SIGKILL of the SuperLink"} <= {
        fault["kind"] for fault in faults
    }
    for run in (line["verdict"] for line in lines if "verdict" in line):
        assert (run["missing"], run["used_twice"], run["remains"], run["surprises"]) == ([], 0, [], 0)
        assert run["same"]
        assert run["difference"] == 0
        assert run["steps"] == run["asked"]


def test_every_kind_of_fault_came() -> None:
    kinds = {line["kind"] for line in LINES if "kind" in line}
    for who in ("a SuperNode", "offbeat join", "the server", "offbeat serve", "the SuperLink"):
        assert {f"SIGKILL of {who}", f"SIGTERM of {who}"} <= kinds
    assert {f"{name} of the secure-sum helper" for name in ("SIGKILL", "SIGTERM")} <= kinds
    assert {f"the site's code {does}" for does in ("raises", "exits", "hangs", "computes NaN")} <= kinds
    lies = ("NaN", "wrong shape", "cut short", "corrupt note", "huge array", "replay")
    assert {f"answer: {lie}" for lie in lies} <= kinds
    assert {"a late joiner", "a key that is not registered", "no key", "plaintext"} <= kinds


def test_records_are_small_and_name_no_place_on_a_machine() -> None:
    for path in (FOLDER / "records").glob("*.jsonl"):
        text = path.read_text()
        assert len(text) < 100_000
        assert not re.search(r"[\"\s]/\w", text)
