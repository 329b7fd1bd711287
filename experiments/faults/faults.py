"""What is done to a run, and what is then seen of it."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import sites
from processes import Process, wait_for
from rogue import BREAKS, LIES, MOUTH
from watching import PATIENCE, Seen, accepted, awaited, fate, first, in_words, is_bad, named, nothing, of_task
from world import LATE, World

from offbeat.deploy.server.run import read_server

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}
OWN = {"raises": "raise", "exits": "exit", "hangs": "hang", "computes NaN": "nan"}
# What a run with secure sums can be told of: the numbers in a share look like any others.
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
        return of_task(world, client, taken["time"])

    return act


def kill_part(number: int, *words: str) -> Act:
    """One process of a site, found by its command line; `offbeat join` sees to the rest."""

    def act(world: World, name: str) -> Seen:
        told = [word.format(name=name) for word in words]
        if not wait_for(lambda: bool(world.pids(*told)) or world.is_over(), PATIENCE):
            return Seen("there was none to kill", None)
        begun = time.time()
        killed = [pid for pid in world.pids(*told) if world.trial.kill(pid, number)]
        wait_for(lambda: not set(killed) & set(world.trial.found()), 30)
        client, gone = world.client(name), time.time()
        return Seen("the site started it again", accepted(world, client, gone, begun))

    return act


def kill_app(number: int) -> Act:
    """A process that Flower has started for one message of the site's."""

    def act(world: World, name: str) -> Seen:
        own: list[int] = []

        def found() -> bool:
            own[:] = [pid for pid in world.pids("flwr-clientapp") if _has(pid, f"site-{name}/")]
            return bool(own) or world.is_over()

        if not wait_for(found, PATIENCE) or not own:
            return Seen("there was none to kill", None)
        begun = time.time()
        for pid in own:
            world.trial.kill(pid, number)
        return of_task(world, world.client(name), begun)

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
        server = read_server(world.folder)
        if server is None or not world.trial.kill(server.pid, number):
            return Seen("there was none to kill", None)
        begun = time.time()
        wait_for(lambda: server.pid not in world.trial.found(), 60)
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
        wait_for(lambda: process.code is not None or world.is_over(), PATIENCE)
        inside = world.client(who) is not None
        process.signal(signal.SIGTERM)
        if process.code is None:
            return Seen("waited, and did not get in" if not inside else "was let in", None, inside)
        told = "refused, in one sentence" if sentence in process.said else "refused"
        return Seen("was let in" if inside else told, None, inside)

    return act


def _has(pid: int, word: str) -> bool:
    """Whether a process's environment has it."""
    try:
        return word.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def kinds() -> Iterator[tuple[str, str, Act, int, int]]:
    """Each kind: its name, who it befalls, what is done, how often in a main run and in a secure one."""
    for order in LIES:
        yield f"answer: {order}", "rogue", lie(order), 3, int(order in STRUCTURAL)
    yield "answer: breaks off", "rogue", lie(BREAKS), 2, 0
    for words, order in OWN.items():
        yield f"the site's code {words}", "site", misbehave(order), 3, 0
    for name, number in SIGNALS.items():
        yield (
            f"{name} of a SuperNode",
            "site",
            kill_part(number, "flower-supernode", "sites/{name}/key"),
            2,
            0,
        )
        resident = kill_part(number, "offbeat.deploy.site.process", "--name {name} ")
        yield f"{name} of a site's resident process", "site", resident, 2, 1
        yield f"{name} of offbeat join", "site", kill_join(number), 2, 0
        yield f"{name} of a message's app process", "site", kill_app(number), 2, 0
        yield f"{name} of the server", "server", kill_server(number), 2, 1
        yield f"{name} of offbeat serve", "server", kill_serve(number), 1, 0
        yield f"{name} of the SuperLink", "server", kill_started(number, "flower-superlink"), 1, 0
        yield (
            f"{name} of the SuperLink's gate",
            "server",
            kill_started(number, "offbeat.deploy.gateway"),
            1,
            0,
        )
        yield f"{name} of the secure-sum helper", "helper", kill_helper(number), 0, 2
    yield "a late joiner", "site", join_late, 2, 0
    trust, mine = ("--certificate", "keys/ca.crt"), ("--key", "elsewhere/sites/late-1/key")
    yield "a key that is not registered", "site", strange((*trust, *mine), "does not know the key"), 2, 0
    yield "no key", "site", strange(trust, "takes only sites that it knows"), 2, 0
    yield "plaintext", "site", strange(("--insecure",), "speaks TLS"), 2, 0
    other = ("--certificate", "elsewhere/ca.crt", *mine)
    yield "another authority", "site", strange(other, "has another certificate"), 1, 0
