"""What a deployment costs: `offbeat join` beside a bare client of Flower, and the server's memory.

    python benchmarks/deployed.py [--sizes 200000] [--updates 80] [--sites 2] [--bare 2]
    python benchmarks/deployed.py --memory [--updates 2000] [--sizes 100000]
    python benchmarks/deployed.py --buffers 8 32 128 [--sizes 10000000]

Without `--memory`: `offbeat serve` with TLS and keys, and its sites, as processes of this machine.
Some sites are started by `offbeat join`; the others, in the same run, are deployment/bare_site.py, which is
Flower's own connection around the same `Site.answer`. Both do the same work for the same server at the same
time. The overhead of an update is the time from sending its task until its upload was accepted, checked and
on disk, less the time that the site worked. The first update of each site is left out, for it contains the
first use of the model. `processes` and `MiB` are the largest of one site during the run.

With `--memory`: the same server and sites in one process and no network, for the resident memory over many
updates, and for what an update costs without Flower. The slope leaves out the first fifth.

With `--buffers`: the most memory of the server's process for buffers of these sizes, each in a new process,
over two server steps. As many sites as the buffer holds answer each task with zeros, and no network is
between. All uploads of two buffers are on the disk at once: 10 GB for 128 uploads of 10,000,000 weights.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from deployment.in_memory import peak, weigh
from deployment.meter import descendants, resident_mib
from deployment.wide import BUFFER, write_task

HERE = Path(__file__).parent
LIMIT = 600.0  # seconds for one turn
KINDS = ("bare", "offbeat")


class Site(NamedTuple):
    """A site of one kind."""

    kind: str
    name: str
    process: "subprocess.Popen[bytes]"


def start_site(folder: Path, kind: str, name: str, address: str, size: int) -> Site:
    """Start a site of one kind."""
    keys, place = folder / "keys", folder / name
    key = keys / "sites" / name / "key"
    if kind == "bare":
        words = [str(HERE / "deployment" / "bare_site.py"), address, str(keys / "ca.crt"), str(key)]
        words += [f"wide_{size}", name, str(place)]
    else:
        words = ["-m", "offbeat", "join", "--superlink", address, "--certificate", str(keys / "ca.crt")]
        words += ["--key", str(key), "--task", f"wide_{size}:task", "--name", name, "--folder", str(place)]
        words += ["--once"]
    environment = os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, *words], env=environment, stdout=log, stderr=log)
    return Site(kind, name, process)


def run_sites(folder: Path, settings: Path, names: dict[str, str], port: int, size: int) -> dict[str, Any]:
    """One run with sites of these kinds; the most processes and MiB of a site of each kind."""
    words = [sys.executable, "-m", "offbeat", "serve", str(settings), "--port", str(port)]
    words += ["--certificates", str(folder / "keys"), "--out", str(folder / "run")]
    most: dict[str, tuple[int, float]] = dict.fromkeys(KINDS, (0, 0.0))
    with contextlib.ExitStack() as stack:
        with (folder / "server.log").open("wb") as log:
            server = subprocess.Popen(words, stdout=log, stderr=log)
        stack.callback(server.kill)
        sites = [start_site(folder, kind, name, f"127.0.0.1:{port}", size) for name, kind in names.items()]
        for site in sites:
            stack.callback(site.process.kill)
        limit = time.monotonic() + LIMIT
        while server.poll() is None:
            for site in sites:
                if site.process.poll() is None:
                    found = [site.process.pid, *descendants(site.process.pid)]
                    processes, mib = most[site.kind]
                    most[site.kind] = max(processes, len(found)), max(mib, sum(map(resident_mib, found)))
                elif site.process.returncode:
                    fail(f"{site.name} failed", folder / f"{site.name}.log")
            if time.monotonic() > limit:
                fail("the run took too long", folder / "server.log")
            time.sleep(0.5)
        if server.returncode:
            fail("offbeat serve failed", folder / "server.log")
    return most


def fail(reason: str, log: Path) -> NoReturn:
    """End with the last words of a process."""
    raise SystemExit(f"deployed: {reason}: {log.read_text()[-2000:]}")


def compare(given: argparse.Namespace, size: int) -> dict[str, Any]:
    """Sites of both kinds in one run."""
    from offbeat.deploy.keys import create_keys

    names = {f"bare-{each}": "bare" for each in range(given.bare)}
    names |= {f"offbeat-{each}": "offbeat" for each in range(given.sites)}
    with tempfile.TemporaryDirectory(prefix="offbeat-") as name:
        folder = Path(name)
        create_keys(folder / "keys", ["127.0.0.1"], list(names), ["localhost"], 2)
        settings = write_task(folder, size, len(names), given.updates)
        most = run_sites(folder, settings, names, given.port, size)
        events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    kind_of = {event["client"]: names[event["name"]] for event in events if event["event"] == "joined"}
    accepted = [event for event in events if event["event"] == "accepted" and event["visit"] > 0]
    found: dict[str, Any] = {"size": size}
    for kind in KINDS:
        own = [event for event in accepted if kind_of[event["client"]] == kind]
        if not own:
            continue
        overheads = [event["seconds"] - event["work"] for event in own]
        found[kind] = {
            "updates": len(own),
            "overhead": [float(each) for each in np.percentile(overheads, (5, 50, 95))],
            "work": float(np.median([event["work"] for event in own])),
            "processes": most[kind][0],
            "mib": most[kind][1],
        }
    if all(kind in found for kind in KINDS):
        found["ratio"] = found["offbeat"]["overhead"][1] / found["bare"]["overhead"][1]
    return found


def print_weights(found: dict[str, Any]) -> None:
    """How the memory went."""
    print(f"{found['size']:,} weights, {found['updates']:,} updates, server and sites in one process")
    for count, weight in found["mib"]:
        print(f"{count:>8,} updates {weight:10.1f} MiB")
    print(f"slope {found['kib_an_update']:.3f} KiB an update; {found['ms_an_update']:.1f} ms an update")


def print_comparison(found: dict[str, Any]) -> None:
    """A row for each kind, and the ratio."""
    for kind in KINDS:
        if kind not in found:
            continue
        row = found[kind]
        low, middle, high = row["overhead"]
        print(
            f"{found['size']:>12,} {kind:<8}{row['updates']:>8}{low:>8.3f}{middle:>7.3f}"
            f"{high:>7.3f}{row['work']:>8.3f}{row['processes']:>10}{row['mib']:>7.0f}"
        )
    if "ratio" in found:
        print(f"{'':>13}offbeat / bare: overhead of an update {found['ratio']:.2f} in the median")


def main() -> None:
    """Print a table and, on the last line, the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", help="weights of the model")
    parser.add_argument("--updates", type=int, help="of each size [80; 2000 with --memory]")
    parser.add_argument("--sites", type=int, default=2, help="sites by offbeat join")
    parser.add_argument("--bare", type=int, default=2, help="sites by a bare client")
    parser.add_argument("--port", type=int, default=27100, help="of the server")
    parser.add_argument("--memory", action="store_true", help="no network: the memory of the server")
    parser.add_argument("--buffers", type=int, nargs="+", help="no network: the most memory by buffer")
    parser.add_argument("--quick", action="store_true", help="the memory of few updates, to see that it runs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.buffers:
        print(f"{'weights':>12}{'buffer':>8}{'peak MiB':>10}{'seconds a step':>16}")
        peaks = []
        for size in given.sizes or [10_000_000]:
            for buffer in given.buffers:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
                    found = child.submit(peak, size, buffer, 2).result()
                peaks.append(found)
                print(f"{size:>12,}{buffer:>8}{found['peak_mib']:>10.0f}{found['seconds_a_step']:>16.2f}")
        print(json.dumps({"peaks": peaks}))
        return
    if given.memory or given.quick:
        size, updates = (1_000, 50) if given.quick else (100_000, 2_000)
        rows = [
            weigh(each, given.sites, (given.updates or updates) // BUFFER * BUFFER)
            for each in given.sizes or [size]
        ]
        for row in rows:
            print_weights(row)
        print(json.dumps({"memory": rows}))
        return
    given.updates = given.updates or 80
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order: nothing stays behind
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{given.sites} sites by offbeat join and {given.bare} bare ones in one run, over TLS; seconds")
    heads = f"{'p5':>8}{'p50':>7}{'p95':>7}{'work':>8}{'processes':>10}{'MiB':>7}"
    print(f"{'weights':>12} {'overhead':<8}{'updates':>8}{heads}")
    rows = []
    for size in given.sizes or [200_000]:
        rows.append(compare(given, size))
        print_comparison(rows[-1])
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
