"""A SuperLink under supervision; its processes are scripted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.deploy import keys
from offbeat.deploy.flower import supervisor
from offbeat.deploy.flower.supervisor import Backend
from offbeat.deploy.network import bind_socket, free_port
from offbeat.deploy.protocol.transport import Backoff
from offbeat.errors import InputError


class Process:
    def __init__(self) -> None:
        self.lives, self.how = True, ""
        self.process = SimpleNamespace(pid=id(self))
        self.stopped = False

    def is_alive(self) -> bool:
        return self.lives

    def is_stopped(self) -> bool:
        return self.stopped

    def resume(self) -> None:
        self.stopped = False

    def stop(self) -> None:
        self.lives, self.how = False, "stop"

    def kill(self) -> None:
        self.lives, self.how = False, "kill"


class World:
    """What was started and asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[Process] = []
        self.places: list[str] = []
        self.answers = True
        self.now = 100.0
        self.commands: list[list[str]] = []
        self.health: str | None = None  # what is wrong with it
        monkeypatch.setattr(supervisor, "superlink_problem", lambda link: self.health)
        monkeypatch.setattr(supervisor, "wait_for_superlink", self._await)
        monkeypatch.setattr(supervisor, "Backoff", lambda *given: Backoff(*given, clock=lambda: self.now))
        monkeypatch.setattr(supervisor, "ChildProcess", self._start)

    def _start(
        self, command: list[str], environment: object, log: Path, pass_fds: tuple[int, ...], stdin: Any = None
    ) -> Process:
        process = Process()
        self.commands.append(command)
        if "offbeat.deploy.flower.superlink" in command:
            assert log.parent.is_dir()
            self.processes.append(process)
        return process

    def _await(self, address: str, seconds: float, alive: object, log: Path) -> None:
        self.places.append(address)
        if not self.answers:
            raise InputError("the SuperLink does not answer.")


def somewhere() -> tuple[str, int]:
    return "127.0.0.1", free_port()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_one_of_ours_is_started_and_ended(world: World, tmp_path: Path) -> None:
    with Backend(tmp_path / "run", Path("serve.toml"), somewhere(), None) as backend:
        backend.start_server(resume=True)
        assert backend.is_server_alive()
    assert not backend.is_server_alive()
    _, words = world.commands
    told = dict(zip(words[3:-1:2], words[4:-1:2], strict=True))
    assert words[-1] == "--resume"
    assert told["--folder"] == str(tmp_path / "run")
    assert Path(told["--settings"]).is_absolute()
    assert told["--superlink"] == world.places[0]
    assert "--sites" not in told
    assert [process.how for process in world.processes] == ["kill"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_only_its_gateway_is_where_sites_look(world: World, tmp_path: Path, host: str) -> None:
    port = free_port()
    with Backend(tmp_path, Path("serve.toml"), (host, port), None):
        (own,) = world.places
        assert own.startswith("127.0.0.1:")
        assert own != f"127.0.0.1:{port}"
        with pytest.raises(InputError, match=f"port {port} of {host} is in use"):
            bind_socket(host, port)
    bind_socket(host, port).close()


def test_an_interrupt_ends_it_at_once(world: World, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Backend(tmp_path, Path("s"), somewhere(), None):
        raise KeyboardInterrupt
    assert [process.how for process in world.processes] == ["kill"]


def test_one_that_does_not_come_up_is_a_sentence_and_is_ended(world: World, tmp_path: Path) -> None:
    world.answers = False
    with pytest.raises(InputError), Backend(tmp_path, Path("s"), somewhere(), None):
        pass
    assert [process.lives for process in world.processes] == [False]


def test_one_that_died_is_started_again(world: World, tmp_path: Path) -> None:
    with Backend(tmp_path, Path("s"), somewhere(), None) as backend:
        backend.keep_alive()
        assert len(world.processes) == 1
        world.processes[0].lives = False
        backend.keep_alive()
        assert [process.lives for process in world.processes] == [False, True]
        assert len(set(world.places)) == 1  # where a server that outlived it looks for it


def test_one_that_starts_and_does_not_answer_is_ended_and_tried_again(world: World, tmp_path: Path) -> None:
    with Backend(tmp_path, Path("s"), somewhere(), None) as backend:
        world.processes[0].lives, world.answers = False, False
        with pytest.raises(InputError):
            backend.keep_alive()
        assert not world.processes[1].lives
        world.answers = True
        world.now += 60
        backend.keep_alive()
        assert [process.lives for process in world.processes] == [False, False, True]


def test_one_that_dies_again_and_again_is_started_less_and_less_often(world: World, tmp_path: Path) -> None:
    with Backend(tmp_path, Path("s"), somewhere(), None) as backend:
        world.answers = False
        for _ in range(300):
            world.processes[-1].lives = False
            before = len(world.processes)
            try:
                backend.keep_alive()
            except InputError:
                assert len(world.processes) == before + 1
            world.now += 1.0
    assert 10 < len(world.processes) < 20


def test_both_processes_know_where_the_keys_of_sites_are(world: World, tmp_path: Path) -> None:
    keys.create_keys(tmp_path / "keys", ["localhost"], ["a", "b"], ["localhost"], 3)
    made = keys.find_certificates(tmp_path / "keys")
    with Backend(tmp_path, Path("s"), somewhere(), made) as backend:
        backend.start_server(resume=False)
    for words in world.commands:
        assert words[words.index("--sites") + 1] == str(made.sites)
    assert str(made.tls.certificate) in world.commands[0]
    assert str(made.tls.key) in world.commands[0]


def test_a_process_that_a_signal_stopped_is_continued_when_it_is_seen_twice(
    world: World, tmp_path: Path
) -> None:
    with Backend(tmp_path, Path("s"), somewhere(), None) as backend:
        [process] = world.processes
        for _ in range(2):  # stopped for a moment, as by a backup
            process.stopped = True
            assert backend.thaw() == []
            process.stopped = False
            assert backend.thaw() == []
        process.stopped = True
        world.health = "timed out"
        assert backend.thaw() == []
        assert backend.thaw() == ["the SuperLink had been stopped by a signal, and is continued."]
        assert not process.stopped
        assert process.lives


def test_a_superlink_that_leaves_four_requests_unanswered_is_started_again(
    world: World, tmp_path: Path
) -> None:
    with Backend(tmp_path, Path("s"), somewhere(), None) as backend:
        for health in ("timed out", "timed out", "timed out", None, "timed out", "timed out", "timed out"):
            world.health = health
            assert backend.thaw() == []
        [said] = backend.thaw()
        assert said.startswith("the SuperLink hangs")
        backend.keep_alive()
        assert [process.how for process in world.processes] == ["kill", ""]
        assert backend.thaw() == []  # the count begins again


@pytest.mark.parametrize("health", ["it answers with HTTP status 500", "the certificate has expired"])
def test_a_superlink_with_another_problem_does_not_hang(world: World, tmp_path: Path, health: str) -> None:
    world.health = health
    with Backend(tmp_path, Path("s"), somewhere(), None) as backend:
        assert [backend.thaw() for _ in range(9)] == [[]] * 9
        assert len(world.processes) == 1
