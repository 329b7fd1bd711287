"""Every file of a stopped run deleted, emptied, cut and flipped: does it go on, and is anything lost?

    python experiments/faults/files.py --out experiments/faults/records

The server and its sites are in this process, with no network between, and the run is stopped in the middle of
a buffer. For each file and each harm a copy of its folder is harmed and resumed, as a person would: where the
server refuses, the file is restored from a backup. A line is written for each. The exit code is 1 where an
accepted upload was lost or used twice, the model is another one than that of a replay, the server said
anything but one sentence, or it did not go on.
"""

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sites
from faults import FILE_HARMS

from offbeat import cli
from offbeat.deploy.protocol.transport import Reply
from offbeat.deploy.server.run import STOP_FILE, ServeOutcome, ServeRequest, serve
from offbeat.deploy.site.site import Site
from offbeat.training.folder import read_jsonl

ROUNDS, STOP_AFTER = 8, 14  # server steps, and tasks before the stop: then an upload waits in the buffer
NAMES = ("north", "south", "east")
_SETTINGS = f"""
[task]
function = "sites:task"
[training]
algorithm = "ca2fl"
clients = {len(NAMES)}
buffer = 2
rounds = {ROUNDS}
eval_every = 2
local_steps = 3
batch_size = 10
"""


class InMemory:
    """A transport whose sites answer at once, in the order in which they were asked."""

    backlog: frozenset[str] = frozenset()

    def __init__(self, all_sites: dict[int, Site], after: Callable[[int], None] = lambda tasks: None) -> None:
        self._sites, self._after = all_sites, after
        self._replies: dict[str, Reply] = {}
        self._tasks = 0

    def nodes(self) -> frozenset[int]:
        """All of them are always there."""
        return frozenset(self._sites)

    def key(self, node: int) -> bytes:
        """None has one."""
        return b""

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        """Have a site answer a message."""
        self._tasks += kind == "task"
        self._after(self._tasks)
        number = f"{len(self._replies)}-{time.monotonic_ns()}"
        answer = ("", b"") if kind == "end" else self._sites[node].answer(kind, header, payload)
        self._replies[number] = Reply(number, node, *answer, None)
        return number

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        """Return the oldest answer alone, so that a stop finds others on their way."""
        number = next((each for each in message_ids if each in self._replies), None)
        return [] if number is None else [self._replies.pop(number)]


def briefly(seconds: float) -> None:
    """Sleep as long as a server does that is told of each upload at once."""
    time.sleep(min(seconds, 0.002))


def resume(place: Path, all_sites: dict[int, Site]) -> ServeOutcome:
    """Start the server in a folder as a person would."""
    known = (place / "settings.json").exists()
    request = ServeRequest(place.parent / "serve.toml", place, known, authenticated=False)
    return serve(request, lambda max_bytes: InMemory(all_sites), briefly)


def accounted(place: Path) -> tuple[int, int, int]:
    """How many uploads were accepted, and how many of these were lost or used twice."""
    events = read_jsonl(place, "events")
    named = {name: {_task(e) for e in events if e["event"] == name} for name in ("accepted", "set_aside")}
    trace = read_jsonl(place, "trace")
    used = [tuple(task[:3]) for line in trace for task in line["tasks"]]
    dropped = {tuple(task) for line in trace for task in line["dropped"]}
    uploads = {path.stem for path in (place / "journal").glob("*.upload")}
    waiting = {tuple(map(int, name.split("-"))) for name in uploads}
    lost = named["accepted"] - set(used) - dropped - waiting - named["set_aside"]
    return len(named["accepted"]), len(lost), len(used) - len(set(used))


def replayed(place: Path) -> float:
    """How far the model is from that of `offbeat replay`."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        cli.main(["replay", str(place), "--task", "sites:task", "--compare", "--json"])
    return float(json.loads(said.getvalue().splitlines()[-1])["difference"])


def _task(event: dict[str, Any]) -> tuple[int, int, int]:
    return event["client"], event["version"], event["visit"]


def harmed(name: str, harm: str, folder: Path) -> dict[str, Any]:
    """One file of a copy of the run, harmed; what was then seen."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, contextlib.ExitStack() as stack:
        shutil.copy(folder.parent / "serve.toml", scratch)
        place = Path(scratch) / "run"
        shutil.copytree(folder, place)
        own = open_sites(stack, folder.parent, Path(scratch))
        backup = (place / name).read_bytes()
        FILE_HARMS[harm](place / name, backup)
        begun = time.perf_counter()
        outcome, sentence = resume(place, own), None
        if outcome.error is not None:
            sentence = outcome.error
            if not (place / "settings.json").exists() and name != "settings.json":
                shutil.rmtree(place)
                shutil.copytree(folder, place)
            (place / name).write_bytes(backup)
            outcome = resume(place, own)
        seconds = time.perf_counter() - begun
        plain = sentence is None or ("\n" not in sentence and "Traceback" not in sentence)
        finished = outcome.error is None and outcome.version == ROUNDS
        accepted, lost, twice = accounted(place) if finished else (0, 0, 0)
        same = finished and replayed(place) == 0.0
        bad = not (plain and finished and same) or lost > 0 or twice > 0
    words = "refused in one sentence; resumed with the backup" if sentence else "resumed without it"
    if bad:
        words = f"not as it should be: {sentence or outcome.error or 'another model'}"
    return {
        "kind": f"{_general(name)} {harm}",
        "seen": words,
        "seconds": round(seconds, 3),
        "bad": bad,
        "accepted": accepted,
        "lost": lost,
        "same": same,
    }


def _general(name: str) -> str:
    """Uploads and lines of the journal have names of their own in every run."""
    return "journal/*.upload" if name.endswith(".upload") else name


def open_sites(stack: contextlib.ExitStack, original: Path, place: Path) -> dict[int, Site]:
    """The sites with what they had on their disks when the server was stopped."""
    found = {}
    for number, name in enumerate(NAMES, 1):
        if place != original:
            shutil.copytree(original / name, place / name)
        site = Site(name, place / name, sites.load, sites.module, sites.losses)
        found[number] = stack.enter_context(contextlib.closing(site))
    return found


def main() -> int:
    """All files, one after another."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the records")
    parser.add_argument("--only", default="", metavar="WORD", help="files whose name has it")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        (home / "serve.toml").write_text(_SETTINGS)
        folder = home / "run"

        def stop(tasks: int) -> None:
            if tasks >= STOP_AFTER:
                (folder / STOP_FILE).touch()

        with contextlib.ExitStack() as stack:
            own = open_sites(stack, home, home)
            request = ServeRequest(home / "serve.toml", folder, False, authenticated=False)
            if not serve(request, lambda max_bytes: InMemory(own, stop), briefly).stopped:
                raise SystemExit("the run was not stopped")
        found = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        names = sorted(str(path.relative_to(folder)) for path in found)
        names = [name for name in names if given.only in name]
        lines = [harmed(name, harm, folder) for name in names for harm in FILE_HARMS]
    (given.out / "files.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        if line["bad"]:
            print(json.dumps(line), file=sys.stderr)
    print(f"{len(names)} files, {len(lines)} harms, {sum(line['bad'] for line in lines)} not as it should be")
    return int(any(line["bad"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
