"""One run with real processes: a server with its SuperLink, sites, rogues and, for secret sums, a helper."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import sites
from processes import Process, Trial, wait_for

from offbeat.deploy.network import free_port

HERE = Path(__file__).parent
DEADLINE = 30  # seconds for a task
DISK = "size=16m"
SITES = ("north", "south", "east")
ROGUES = ("mallory", "trudy", "eve")
LATE = ("late-1", "late-2")
_SETTINGS = """
[task]
function = "sites:task"

[training]
algorithm = "{method}"
clients = {clients}
buffer = {buffer}
rounds = {rounds}
local_steps = 3
batch_size = 10
eval_every = 10

[network]
deadline = {deadline}
"""
_SECURE = """
[secure]
helper = "https://127.0.0.1:{port}"
certificate = "keys/ca.crt"
token = "keys/helper.token"
minimum = 2
"""


class World:
    """Everything lies in one folder; whoever dies by a fault is brought back by `revive`."""

    def __init__(self, place: Path, rounds: int, *, secure: bool) -> None:
        self.place, self.secure = place, secure
        self.trial = Trial(place)
        self.folder, self.orders = place / "run", place / "orders"
        self.port, self.helper_port = free_port(), free_port()
        self.rounds = rounds
        self.sites = SITES if not secure else SITES[:2]
        self.processes: dict[str, Process] = {}
        self.busy = threading.Lock()  # whoever ends the server on purpose holds it
        self.surprises = 0  # ends of the server that nobody meant
        self.has_own_disk = False

    def begin(self) -> None:
        """The SuperLink first, then who joins it."""
        self.orders.mkdir(parents=True)
        self._mount()
        os.environ[sites.ORDERS] = str(self.orders)
        os.environ["PYTHONPATH"] = os.pathsep.join((str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])))
        everybody = ",".join((*SITES, *ROGUES, *LATE))
        for name in ("keys", "elsewhere"):
            made = self.trial.offbeat(
                "keys", "keys", "--hosts", "127.0.0.1", "--sites", everybody, "--out", name
            )
            assert made.wait(60) == 0, made.said
        clients = len(SITES) + len(ROGUES) + len(LATE)
        text = _SETTINGS.format(
            method="fedbuff" if self.secure else "ca2fl",
            clients=clients,
            buffer=4 if self.secure else 2,
            rounds=self.rounds,
            deadline=DEADLINE,
        )
        (self.place / "serve.toml").write_text(
            text + (_SECURE.format(port=self.helper_port) if self.secure else "")
        )
        if self.secure:
            self.help()
            if not wait_for((self.place / "helper.x25519.pub").exists, 60):
                raise TimeoutError(self.processes["helper"].said)
        self.serve()
        server = self.processes["serve"]
        if not wait_for(lambda: "a site joins by" in server.said or server.code is not None, 120):
            raise TimeoutError(server.said)
        for name in (*self.sites, *ROGUES):
            self.join(name)

    def serve(self, *words: str) -> None:
        given = ("serve.toml", "--out", "run", "--port", str(self.port), "--certificates", "keys")
        self.processes["serve"] = self.trial.offbeat("serve", "serve", *given, *words)

    def help(self) -> None:
        tls = ("--certificate", "keys/helper.pem", "--certificate-key", "keys/helper.key")
        own = ("--key", "helper.x25519", "--store", "helper.db", "--token", "keys/helper.token")
        place = ("--port", str(self.helper_port), "--sites", "keys/sites", "--minimum", "2")
        self.processes["helper"] = self.trial.offbeat("helper", "helper", *own, *tls, *place)

    def _mount(self) -> None:
        """Give the run's folder a small disk of its own, where the system allows it."""
        self.folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", DISK, "faults", str(self.folder)]
        self.has_own_disk = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def unmount(self) -> None:
        """Keep the files of the run, and give the disk back."""
        if self.has_own_disk:
            kept = self.place / "kept"
            shutil.copytree(self.folder, kept)
            subprocess.run(["umount", str(self.folder)], check=True)
            shutil.rmtree(self.folder)
            kept.rename(self.folder)

    def join(self, name: str, *words: str, script: str | None = None) -> Process:
        """A site, or a rogue in its place; `words` for one that is not as it should be."""
        given = ["--superlink", f"127.0.0.1:{self.port}", "--task", "sites:task", "--name", name]
        given += ["--folder", f"site-{name}"]
        given += words or ["--certificate", "keys/ca.crt", "--key", f"keys/sites/{name}/key"]
        if self.secure:
            given += ["--helper-key", "helper.x25519.pub", "--minimum", "2"]
        if name in ROGUES or script is not None:
            process = self.trial.start(name, str(HERE / "rogue.py"), *given)
        else:
            process = self.trial.offbeat(name, "join", *given)
        self.processes[name] = process
        return process

    def revive(self) -> None:
        """Go on with the server where it ended without a model."""
        wait_for(lambda: not self.pids("offbeat.deploy.flower.superlink"), 60)
        self.serve("--resume", *(["--set-aside"] if self._has_few() else []))

    def tend(self) -> None:
        """The server ended though nobody meant it to: that is told, and it goes on."""
        with self.busy:
            process = self.processes["serve"]
            if process.code not in (None, 0):
                self.surprises += not self._has_few()
                print(f"the server ended: {process.said[-600:]}", file=sys.stderr)
                self.revive()

    def _has_few(self) -> bool:
        """Whether a secure sum was refused because one client is too much of it, as few sites are there."""
        said = self.processes["serve"].said[-600:]
        return "weights so unequal" in said or "distinct clients" in said

    def is_over(self) -> bool:
        """Whether the run has ended in order."""
        return self.processes["serve"].code == 0

    def pids(self, *words: str) -> list[int]:
        """Processes whose command line has all these words."""
        return [pid for pid, line in self.trial.found().items() if all(word in line for word in words)]

    def events(self) -> list[dict[str, Any]]:
        """All so far, with times in seconds."""
        lines = read(self.folder / "events.jsonl")
        return [line | {"time": datetime.fromisoformat(line["time"]).timestamp()} for line in lines]

    def done(self, name: str) -> list[dict[str, Any]]:
        """What a site did of its orders."""
        return read(self.orders / f"{name}.done")

    def client(self, name: str) -> int | None:
        """Its number, once it has joined."""
        found = [e["client"] for e in self.events() if e["event"] == "joined" and e["name"] == name]
        return found[-1] if found else None

    def end(self) -> list[str]:
        for name in (*self.sites, *ROGUES, *LATE):
            if name in self.processes:
                self.processes[name].signal(signal.SIGTERM)
        left = self.trial.end()
        self.unmount()
        return left


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, of which the last may be half written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def replayed(world: World) -> dict[str, Any]:
    """What `offbeat replay --compare` finds, with honest sites."""
    words = ["-m", "offbeat", "replay", "run", "--task", "sites:task", "--compare", "--json"]
    log = world.place / "replay.log"
    # with as many threads as the run had: others may add in another order
    process = Process([sys.executable, *words], world.place, log, {sites.ORDERS: "", "OMP_NUM_THREADS": "1"})
    process.wait(180)
    found: dict[str, Any] = json.loads(
        next(line for line in process.said.splitlines() if line.startswith("{"))
    )
    return found
