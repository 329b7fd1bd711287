"""How many sites one server carries, and what saturates first.

    python benchmarks/many_sites.py [--sites 100 300 1000] [--size 200000] [--seconds 30] [--processes 2]

`offbeat serve` runs with TLS and one key for each site, all on this machine. The sites are light:
each has its own key, its own connection and the code of `offbeat join` (`SiteConnection`), many threads to a
process, but they answer every task with an update that was computed once. What is measured is therefore the
server and the SuperLink with its gateway, and not the training. Updates are counted over `--seconds` seconds
that begin once every site has joined and has had its first task, or after `--patience` seconds with those
that have. The processor time of each process in that window is given in cores, beside the cores that were
idle: a figure near 1 for a process is a full core, which Python does not exceed, and the process nearest to
it is named. Where nothing was idle and no process is near 1, the machine is the limit. All figures of one row
are of the same run.
"""

import argparse
import contextlib
import json
import logging
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from deployment.meter import descendants, resident_mib
from deployment.wide import write_task

UPDATES = 10**9  # more than there will be
ROLES = {
    "server": "offbeat.deploy.flower.server",
    "SuperLink": "offbeat.deploy.flower.superlink",
    "sites": "--worker",
}


class LightSite:
    """A site without a model: it answers each task with what a real site computed once."""

    lock = threading.Lock()
    sample: Any = None  # the answer to the first task of this process

    def __init__(self, real: Any, name: str, key: Path) -> None:
        from offbeat.deploy.keys import read_signer

        self._real, self._name, self._id = real, name, secrets.token_hex(16)
        self.sign = read_signer(key)[1]
        self.max_message_bytes, self.refusal = real.max_message_bytes, None

    def answer(self, kind: str, header: str, payload: bytes) -> tuple[str, bytes]:
        """Answer as a site does."""
        from msgspec import structs

        from offbeat.deploy.protocol import messages

        with self.lock:
            if kind == "hello":
                reply = messages.decode_message(
                    self._real.answer(kind, header, payload)[0], messages.HelloReply
                )
                return messages.encode_message(
                    structs.replace(reply, name=self._name, site=self._id, key=None)
                ), b""
            if LightSite.sample is None:
                answered, update = self._real.answer(kind, header, payload)
                LightSite.sample = messages.decode_message(answered, messages.UploadMessage), update
        upload, update = LightSite.sample
        task = messages.decode_message(header, messages.TaskMessage)
        return messages.encode_message(structs.replace(upload, run=task.run, task=task.task)), update


def work(folder: Path, address: str, names: list[str], size: int) -> None:
    """Serve as many sites as there are names, until the process is ended."""
    from offbeat.deploy.config import make_site_module
    from offbeat.deploy.flower.private_api import FleetClient
    from offbeat.deploy.flower.site import SiteConnection, SuperLinkAddress
    from offbeat.deploy.keys import load_site_key
    from offbeat.deploy.site.site import Site, SiteOptions
    from offbeat.training.task import load_task

    logging.getLogger().setLevel(logging.CRITICAL)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    task = load_task(f"wide_{size}:task")
    make = partial(make_site_module, f"wide_{size}:task")
    real = Site("real", folder / f"real-{names[0]}", task.site_examples, make, task.loss)
    link = SuperLinkAddress(address, folder / "keys" / "ca.crt")

    def serve(name: str) -> None:
        key = folder / "keys" / "sites" / name / "key"
        options = SiteOptions(name, folder / "sites" / name, f"wide_{size}:task", key)
        options.folder.mkdir(parents=True, exist_ok=True)
        client = FleetClient(link.address, link.authority, load_site_key(key))
        light: Any = LightSite(real, name, key)
        SiteConnection(light, client, options, link, lambda text: None, lambda: False, lambda: None).run()

    threads = [threading.Thread(target=serve, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(sites: int, given: argparse.Namespace) -> dict[str, Any]:
    """One row: the rate, the processor time and the memory of each process."""
    from offbeat.deploy.keys import create_keys
    from offbeat.deploy.network import free_port

    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        names = [f"site-{number:04d}" for number in range(sites)]
        create_keys(folder / "keys", ["127.0.0.1"], names, ["127.0.0.1"], 3)
        page, port = free_port(), free_port()
        write_task(folder, given.size, sites, UPDATES, max(2, sites // 10), page)
        paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = ["-m", "offbeat", "serve", "serve.toml", "--certificates", "keys"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--out", "run"]
        log = stack.enter_context((folder / "log").open("wb"))

        def start(*words: str) -> "subprocess.Popen[bytes]":
            child = subprocess.Popen(
                [sys.executable, *words], cwd=folder, env=environment, stdout=log, stderr=log
            )
            stack.callback(stop, child)
            return child

        started = [start(*command)]
        for number in range(given.processes):
            own = names[number :: given.processes]
            words = ["--worker", str(folder), f"127.0.0.1:{port}", str(given.size), *own]
            started.append(start(str(Path(__file__).resolve()), *words))
        begun = time.monotonic()
        while True:
            now = status(page)
            connected = 0 if now is None else int(now["present"])
            waited = time.monotonic() - begun
            if connected >= sites or (waited > given.patience and now is not None):
                break
            if waited > 2 * given.patience:
                raise SystemExit(f"no site joined:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.5)
        joined = time.monotonic() - begun
        while tasks(page) < connected and time.monotonic() - begun < 2 * given.patience:
            time.sleep(0.5)  # the first task of a site also sends it the settings
        before, accepted, first = processor_seconds(started), tasks(page), time.monotonic()
        idle = idle_seconds()
        time.sleep(given.seconds)
        after, seconds = processor_seconds(started), time.monotonic() - first
        return {
            "sites": sites,
            "connected": connected,
            "join_seconds": round(joined, 1),
            "updates_per_second": round((tasks(page) - accepted) / seconds, 2),
            "cores": {role: round((after[role] - before[role]) / seconds, 2) for role in ROLES},
            "idle_cores": round((idle_seconds() - idle) / seconds, 2),
            "MiB": {role: round(value) for role, value in memory(started).items()},
        }


def status(page: int) -> dict[str, Any] | None:
    """What the live page shows."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{page}/status.json", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:
        return None


def tasks(page: int) -> int:
    """How many updates were accepted."""
    for _ in range(20):
        now = status(page)
        if now is not None:
            return int(now["tasks"]["accepted"])
        time.sleep(0.2)
    raise SystemExit("the live page does not answer")


def processes(started: "list[subprocess.Popen[bytes]]") -> dict[str, list[int]]:
    """The processes of each role."""
    found: dict[str, list[int]] = {role: [] for role in ROLES}
    for child in started:
        for pid in [child.pid, *descendants(child.pid)]:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                role = next((role for role, mark in ROLES.items() if mark in words), None)
                if role is not None:
                    found[role].append(pid)
    return found


def processor_seconds(started: "list[subprocess.Popen[bytes]]") -> dict[str, float]:
    """The processor time of each role so far."""
    tick = os.sysconf("SC_CLK_TCK")
    total = dict.fromkeys(ROLES, 0.0)
    for role, pids in processes(started).items():
        for pid in pids:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total[role] += (int(fields[11]) + int(fields[12])) / tick
    return total


def idle_seconds() -> float:
    """The idle time of all cores since the machine started."""
    return int(Path("/proc/stat").read_text().split()[4]) / os.sysconf("SC_CLK_TCK")


def memory(started: "list[subprocess.Popen[bytes]]") -> dict[str, float]:
    """The resident memory of each role."""
    return {role: sum(map(resident_mib, pids)) for role, pids in processes(started).items()}


def stop(child: "subprocess.Popen[bytes]") -> None:
    """End a process and what it started."""
    pids = descendants(child.pid)
    for pid in [child.pid, *pids]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    child.wait()


def main() -> None:
    """Measure, and print a table."""
    if sys.argv[1:2] == ["--worker"]:
        folder, address, size, *names = sys.argv[2:]
        work(Path(folder), address, names, int(size))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--size", type=int, default=200_000, help="weights of the model")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--patience", type=float, default=90.0, help="seconds for all sites to join")
    parser.add_argument("--processes", type=int, default=2, help="that the sites are divided among")
    given = parser.parse_args()
    cores = os.cpu_count() or 1
    print(f"{cores} cores; model of {given.size:,} weights; {given.seconds:.0f} s")
    columns = ("sites", "connected", "joined in", "updates/s", "server", "SuperLink", "clients")
    print(f"| {' | '.join(columns)} | idle | nearest to a core |")
    print("|---|---|---|---|---|---|---|---|---|")
    for sites in given.sites:
        row = measure(sites, given)
        used = row["cores"]
        served = {role: used[role] for role in ("server", "SuperLink")}
        first = max(served, key=lambda role: served[role])
        shown = " | ".join(f"{used[role]:.2f}" for role in ROLES)
        begin = f"| {sites} | {row['connected']} | {row['join_seconds']} s | {row['updates_per_second']} "
        print(f"{begin}| {shown} | {row['idle_cores']:.2f} | {first} {served[first]:.2f} |", flush=True)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
