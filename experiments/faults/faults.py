"""What is done to a run, and what is then seen of it."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import sites
from processes import Process, wait_for
from rogue import BREAKS, CLOCK, LIES, MOUTH
from watching import PATIENCE, Seen, accepted, awaited, fate, first, in_words, is_bad, named, nothing, of_task
from world import LATE, World

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}
OWN = {"raises": "raise", "exits": "exit", "hangs": "hang", "computes NaN": "nan"}
# What a run with secure sums can be told of: the numbers in a share look like any others.
IDLE_CONNECTIONS = 200
HARMED_FILES = (
    "settings.json",
    "roster.json",
    "trace.jsonl",
    "records.jsonl",
    "journal/kept.jsonl",
    "journal/run",
    "checkpoint/state.safetensors",
)
FILE_HARMS: dict[str, Callable[[Path, bytes], object]] = {
    "deleted": lambda path, data: path.unlink(),
    "emptied": lambda path, data: path.write_bytes(b""),
    "cut": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "flipped": lambda path, data: path.write_bytes(
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 2]) + data[len(data) // 2 + 1 :]
    ),
}
STRUCTURAL = ("wrong shape", "cut short", "no JSON", "version from the future")


Act = Callable[[World, str], Seen]  # on a site, where it is about one


def lie(order: str) -> Act:
    """A rogue's next answer is a bad one."""

    def act(world: World, name: str) -> Seen:
        begun = time.time()
        sites.give(world.orders, f"{name}{MOUTH}", order)
        told = awaited(world, lambda: first(world.done(f"{name}{MOUTH}"), begun, "told"))
        if told is None:
            return nothing(world)
        client = world.client(name)
        seen = awaited(world, lambda: fate(world, told["task"], told["time"]))
        if seen is None:
            return nothing(world)
        return Seen(in_words(seen), accepted(world, client, seen["time"], told["time"]), is_bad(seen))

    return act


def misbehave(order: str) -> Act:
    """A site's own code goes wrong at its next task."""

    def act(world: World, name: str) -> Seen:
        begun = time.time()
        sites.give(world.orders, name, order)
        taken = awaited(world, lambda: first(world.done(name), begun, "order"))
        if taken is None:
            return nothing(world)
        client = world.client(name)
        if order == "exit":  # as a service manager would
            world.processes[name].wait(60)
            world.join(name)
        return of_task(world, client, taken["time"])

    return act


def kill_join(number: int) -> Act:
    """The whole site, which somebody starts again."""

    def act(world: World, name: str) -> Seen:
        process, begun = world.processes[name], time.time()
        process.signal(number)
        process.wait(60)
        world.join(name)
        return Seen("started again, the same client", accepted(world, world.client(name), time.time(), begun))

    return act


def kill_server(number: int) -> Act:
    """The process that trains."""

    def act(world: World, name: str) -> Seen:
        begun = time.time()
        killed = [pid for pid in world.pids("offbeat.deploy.flower.server") if world.trial.kill(pid, number)]
        if not killed:
            return Seen("there was none to kill", None)
        wait_for(lambda: not set(killed) & set(world.trial.found()), 60)
        return Seen("resumed by offbeat serve", accepted(world, None, time.time(), begun))

    return act


def kill_started(number: int, word: str) -> Act:
    """One that offbeat serve has started."""

    def act(world: World, name: str) -> Seen:
        begun = time.time()
        killed = [pid for pid in world.pids(word) if world.trial.kill(pid, number)]
        wait_for(lambda: not set(killed) & set(world.trial.found()), 60)
        return Seen("started again by offbeat serve", accepted(world, None, time.time(), begun))

    return act


def freeze(word: str) -> Act:
    """One that offbeat serve has started is stopped, and nobody lets it continue."""

    def act(world: World, name: str) -> Seen:
        begun, before = time.time(), len(world.processes["serve"].said)
        frozen = [pid for pid in world.pids(word) if world.trial.kill(pid, signal.SIGSTOP)]
        if not frozen:
            return Seen("there was none to stop", None)
        said = lambda: world.processes["serve"].said[before:]  # noqa: E731
        told = awaited(world, lambda: "had been stopped by a signal" in said() or None)
        words = "named, and continued by offbeat serve" if told else "was not named"
        return Seen(words, accepted(world, None, time.time(), begun), stuck=not told and not world.is_over())

    return act


def kill_serve(number: int) -> Act:
    """The command itself, and a person who resumes."""

    def act(world: World, name: str) -> Seen:
        begun = time.time()
        with world.busy:
            process = world.processes["serve"]
            process.signal(number)
            process.wait(180)
            if process.code != 0:
                world.revive()
        return Seen("resumed with --resume", accepted(world, None, time.time(), begun))

    return act


def kill_helper(number: int) -> Act:
    """Away for some seconds, then started again with the same store."""

    def act(world: World, name: str) -> Seen:
        process, begun = world.processes["helper"], time.time()
        process.signal(number)
        process.wait(60)
        time.sleep(10)
        world.help()
        back = time.time()
        stepped = awaited(world, lambda: first(named(world, "stepped"), back, "version"))
        words = "the run waited for it" if stepped else "no step was seen after it"
        seconds = stepped["time"] - begun if stepped else None
        return Seen(words, seconds, stuck=stepped is None and not world.is_over())

    return act


def connect_silently(world: World, name: str) -> Seen:
    """Two hundred connections that say nothing, while sites train."""
    begun = time.time()
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", world.port), timeout=30))
        return Seen("updates were accepted meanwhile", accepted(world, None, time.time(), begun))


def fill_disk(world: World, name: str) -> Seen:
    """The disk of the run's folder is full for a while."""
    begun, filler = time.time(), world.folder / "filler"
    if not world.has_own_disk:
        return Seen("the campaign may not mount a disk here", None)
    said = len(world.processes["serve"].said)
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(65536))
    told = awaited(world, lambda: "is full" in world.processes["serve"].said[said:] or None)
    time.sleep(5)
    filler.unlink()
    words = "called a full disk; the run continued by itself" if told else "was not called a full disk"
    return Seen(words, accepted(world, None, time.time(), begun), stuck=not told and not world.is_over())


def misset_clock(world: World, name: str) -> Seen:
    """A site whose clock is ten minutes behind; then somebody sets it right."""
    new = next((each for each in LATE if each not in world.processes), None)
    if new is None:
        return Seen("there was none left to join", None)
    begun, os.environ[CLOCK] = time.time(), "-600"
    try:
        process = world.join(new, script="rogue.py")
    finally:
        del os.environ[CLOCK]
    told = awaited(world, lambda: "clock is" in process.said or None)
    inside = world.client(new) is not None
    process.signal(signal.SIGTERM)
    process.wait(60)
    world.join(new)
    client = awaited(world, lambda: world.client(new))
    words = "refused in one sentence; joined when it was set right" if told else "was not told"
    seconds = None if client is None else accepted(world, client, time.time(), begun)
    return Seen(words, seconds, bad=inside, stuck=not told and not world.is_over())


def harm_file(name: str, harm: str) -> Act:
    """The server is stopped, a file of its run is harmed, and a person who has a backup resumes."""

    def act(world: World, site: str) -> Seen:
        begun, path = time.time(), world.folder / name
        with world.busy:
            process = world.processes["serve"]
            process.signal(signal.SIGTERM)
            process.wait(180)
            if process.code == 0 or not path.exists():
                return Seen("the run ended first", None)
            backup = path.read_bytes()
            FILE_HARMS[harm](path, backup)
            world.revive()
            process, resumed = world.processes["serve"], time.time()
            went_on = lambda: first(named(world, "accepted"), resumed, "visit") is not None  # noqa: E731
            wait_for(lambda: process.code is not None or went_on(), PATIENCE)
            if "Traceback" in process.said:
                return Seen("a traceback", None, bad=True)
            refused = process.code not in (None, 0)
            if refused:
                path.write_bytes(backup)
                world.revive()
        words = "refused in one sentence; resumed with the backup" if refused else "resumed without it"
        return Seen(words, accepted(world, None, time.time(), begun))

    return act


def join_late(world: World, name: str) -> Seen:
    """One more site, in the middle."""
    new = next((each for each in LATE if each not in world.processes), None)
    if new is None:
        return Seen("there was none left to join", None)
    begun = time.time()
    world.join(new)
    client = awaited(world, lambda: world.client(new))
    return Seen("joined, and trained", None if client is None else accepted(world, client, begun, begun))


def strange(words: tuple[str, ...], sentence: str) -> Act:
    """Somebody who may not: what they are told, and that they did not get in."""

    def act(world: World, name: str) -> Seen:
        who = f"stranger-{time.monotonic_ns()}"
        process: Process = world.join(who, *words)
        said = lambda: process.code is not None or sentence in process.said  # noqa: E731
        wait_for(lambda: said() or world.is_over(), PATIENCE)
        inside = world.client(who) is not None
        process.signal(signal.SIGTERM)
        told = "refused, in one sentence" if sentence in process.said else "refused"
        return Seen("was let in" if inside else told, None, inside)

    return act


def kinds() -> Iterator[tuple[str, str, Act, int, int]]:
    """Each kind: its name, who it befalls, what is done, how often in a main run and in a secure one."""
    for order in LIES:
        yield f"answer: {order}", "rogue", lie(order), 1, int(order in STRUCTURAL)
    yield "answer: breaks off", "rogue", lie(BREAKS), 1, 0
    for words, order in OWN.items():
        yield f"the site's code {words}", "site", misbehave(order), 1, 0
    for name, number in SIGNALS.items():
        yield f"{name} of offbeat join", "site", kill_join(number), 2, 1
        yield f"{name} of the server", "server", kill_server(number), 1, 1
        yield f"{name} of offbeat serve", "server", kill_serve(number), 1, 0
        yield (
            f"{name} of the SuperLink",
            "server",
            kill_started(number, "offbeat.deploy.flower.superlink"),
            1,
            1,
        )
        yield f"{name} of the secure-sum helper", "helper", kill_helper(number), 0, 2
    yield "SIGSTOP of the server", "server", freeze("offbeat.deploy.flower.server"), 1, 0
    yield "SIGSTOP of the SuperLink", "server", freeze("offbeat.deploy.flower.superlink"), 1, 0
    yield "200 silent connections", "server", connect_silently, 1, 0
    for file in HARMED_FILES:
        for harm in FILE_HARMS:
            yield f"{file} {harm}", "server", harm_file(file, harm), 1, 0
    yield "a full disk", "server", fill_disk, 1, 0
    yield "a clock that is ten minutes behind", "site", misset_clock, 1, 0
    yield "a late joiner", "site", join_late, 1, 0
    trust, mine = ("--certificate", "keys/ca.crt"), ("--key", "elsewhere/sites/late-1/key")
    yield "a key that is not registered", "site", strange((*trust, *mine), "does not know this key"), 1, 0
    yield "no key", "site", strange(trust, "accepts registered sites only"), 1, 0
    yield "plaintext", "site", strange(("--insecure",), "speaks TLS"), 1, 0
    other = ("--certificate", "elsewhere/ca.crt", *mine)
    yield "another authority", "site", strange(other, "is not valid under"), 1, 0
