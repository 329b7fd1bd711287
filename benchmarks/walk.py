"""How many files and functions of the package take part in one server step, or in one deployed upload.

    python benchmarks/walk.py [simulated | deployed] [--list]

`simulated`: one server step of FedBuff with evaluation and records in a run folder, as `offbeat run`
computes it. `deployed`: one upload at the server, from the network's reply until the upload is in the buffer
and the server uses the network again, for an upload that does not fill the buffer; server and sites are in
one process, and what sites do is not counted.

The functions that are called are counted with `sys.setprofile`; `switches` is how often a call goes from one
file to another.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from deployment.in_memory import InMemory, briefly, open_sites

import offbeat
from offbeat.deploy.protocol.transport import Reply
from offbeat.deploy.server.run import serve
from offbeat.deploy.site.site import Site
from offbeat.training.build import build_run
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder
from offbeat.training.runner import run_experiment

PACKAGE = str(Path(offbeat.__file__).parent)
SIZE, NODES, UPDATES = 1000, 3, 12


class Walk:
    """Notes the functions of the package that are called between `start` and `stop`."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = {}  # by file
        self.switches = 0
        self._last = ""

    def start(self) -> None:
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        file = str(Path(code.co_filename).relative_to(PACKAGE))
        self.functions.setdefault(file, set()).add(code.co_qualname)
        self.switches += file != self._last
        self._last = file


def simulated() -> Walk:
    """The fifth server step of a run."""
    experiment = Experiment.of(algorithm="fedbuff", rounds=6, eval_every=1, clients=20, engine="vectorised")
    walk = Walk()
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-") as name,
        RunFolder.begin(Path(name) / "run", experiment.settings()) as folder,
    ):
        steps = run_experiment(experiment, build_run(experiment), folder)
        for _ in range(5):
            next(steps)
        walk.start()
        next(steps)
        walk.stop()
        steps.close()  # type: ignore[attr-defined]
    return walk


class Watched(InMemory):
    """One reply at a time; notes what the server does with one upload."""

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites, UPDATES)
        self.walk = Walk()
        self._uploads = 0

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        self.walk.stop()
        return super().push(node, kind, header, payload, timeout)

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        self.walk.stop()
        replies = super().pull(message_ids[:1])
        self._uploads += sum(reply.message_id.startswith("task") for reply in replies)
        if replies and self._uploads == UPDATES // 2 + 1:  # buffers hold two
            self._uploads += UPDATES
            self.walk.start()
        return replies


def deployed() -> Walk:
    """One upload in the middle of a run."""
    with open_sites(SIZE, NODES, UPDATES) as (request, sites):
        transport = Watched(sites)
        outcome = serve(request, lambda limit: transport, briefly)
    if outcome.error:
        raise SystemExit(f"walk: the run failed: {outcome.error}")
    return transport.walk


def main() -> None:
    """Measure and print a line of JSON, with --list after the functions by file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=("simulated", "deployed"), default="simulated")
    parser.add_argument("--list", action="store_true", help="also name the files and functions")
    given = parser.parse_args()
    walk = simulated() if given.mode == "simulated" else deployed()
    if given.list:
        for file, functions in sorted(walk.functions.items()):
            print(f"{file}: {', '.join(sorted(functions))}")
    functions = sum(map(len, walk.functions.values()))
    found = {"files": len(walk.functions), "functions": functions, "switches": walk.switches}
    print(json.dumps({"mode": given.mode} | found))


if __name__ == "__main__":
    main()
