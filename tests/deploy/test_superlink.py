"""A SuperLink under supervision; its processes and its control interface are scripted."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from offbeat.deploy import keys
from offbeat.deploy.flower import supervisor
from offbeat.deploy.flower.commands import Certificates, SuperLinkAddress, find_certificates
from offbeat.deploy.flower.private_api import FlowerError
from offbeat.deploy.flower.supervisor import ListenAddress, running_backend
from offbeat.deploy.network import bind_socket, free_port
from offbeat.deploy.protocol.transport import Backoff
from offbeat.errors import InputError

PEM = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo


class Process:
    def __init__(self, events: list[Any]) -> None:
        self.lives, self.how = True, ""
        self.process = SimpleNamespace(stdin=self, pid=id(self))
        self.stopped = False
        self.write, self.flush = events.append, lambda: None

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
        self.keys: dict[bytes, int] = {}  # those that may connect
        self.events: list[Any] = []
        self.answers = True
        self.now = 100.0
        self.commands: list[list[str]] = []
        self.health: str | None = None  # what is wrong with it
        monkeypatch.setattr(supervisor, "superlink_problem", lambda link: self.health)
        monkeypatch.setattr(supervisor, "wait_for_superlink", self._await)
        monkeypatch.setattr(supervisor, "Backoff", lambda *given: Backoff(*given, clock=lambda: self.now))
        monkeypatch.setattr(supervisor.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(supervisor, "ControlClient", lambda address, authority: self)
        monkeypatch.setattr(supervisor, "ChildProcess", self._start)

    def registered_keys(self) -> dict[bytes, int]:
        return dict(self.keys)

    def register_key(self, key: bytes) -> None:
        self.events.append("register")
        self.keys[key] = len(self.keys) + 1

    def unregister_key(self, node: int) -> None:
        self.keys = {key: each for key, each in self.keys.items() if each != node}

    def names(self, folder: Path) -> list[str]:
        """The sites that may connect."""
        paths = (folder / "sites").glob("*/key.pub")
        known = {keys.read_public_key(path).public_bytes(*PEM): path.parent.name for path in paths}
        return sorted(known.get(key, "?") for key in self.keys)

    def _start(
        self, command: list[str], environment: object, log: Path, pass_fds: tuple[int, ...], stdin: Any = None
    ) -> Process:
        process = Process(self.events)
        if "offbeat.deploy.flower.superlink" in command:
            assert log.parent.is_dir()
            self.processes.append(process)
        else:
            self.commands.append(command)
        return process

    def _await(self, link: SuperLinkAddress, seconds: float, alive: object, log: Path | None = None) -> None:
        self.places.append(link.address)
        if not self.answers:
            raise InputError("the SuperLink does not answer.")


def somewhere() -> ListenAddress:
    return ListenAddress("127.0.0.1", free_port())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    keys.create_keys(tmp_path / "keys", ["localhost"], ["a", "b"], ["localhost"], 3)
    return find_certificates(tmp_path / "keys")


def test_one_of_ours_is_started_and_ended(world: World, tmp_path: Path) -> None:
    with running_backend(tmp_path / "run", Path("serve.toml"), somewhere(), None) as backend:
        backend.start_server(resume=True)
        assert backend.is_server_alive()
    assert not backend.is_server_alive()
    [words] = world.commands
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
    with running_backend(tmp_path, Path("serve.toml"), ListenAddress(host, port), None):
        (own,) = world.places
        assert own.startswith("127.0.0.1:")
        assert own != f"127.0.0.1:{port}"
        with pytest.raises(InputError, match=f"port {port} of {host} is in use"):
            bind_socket(host, port)
    bind_socket(host, port).close()


def test_one_of_others_is_only_asked(world: World, tmp_path: Path) -> None:
    with running_backend(
        tmp_path, Path("serve.toml"), SuperLinkAddress("server:8000", None), None
    ) as backend:
        backend.keep_alive()
        assert backend.link.address == "server:8000"
    assert world.processes == []


def test_an_interrupt_ends_it_at_once(world: World, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), running_backend(tmp_path, Path("s"), somewhere(), None):
        raise KeyboardInterrupt
    assert [process.how for process in world.processes] == ["kill"]


def test_one_that_does_not_come_up_is_a_sentence_and_is_ended(world: World, tmp_path: Path) -> None:
    world.answers = False
    with pytest.raises(InputError), running_backend(tmp_path, Path("s"), somewhere(), None):
        pass
    assert [process.lives for process in world.processes] == [False]


def test_one_that_died_is_started_again(world: World, tmp_path: Path) -> None:
    with running_backend(tmp_path, Path("s"), somewhere(), None) as backend:
        backend.keep_alive()
        assert len(world.processes) == 1
        world.processes[0].lives = False
        backend.keep_alive()
        assert [process.lives for process in world.processes] == [False, True]
        assert len(set(world.places)) == 1  # where a server that outlived it looks for it
        assert world.events == [b"open"] * 3


def test_one_that_starts_and_does_not_answer_is_ended_and_tried_again(world: World, tmp_path: Path) -> None:
    with running_backend(tmp_path, Path("s"), somewhere(), None) as backend:
        world.processes[0].lives, world.answers = False, False
        with pytest.raises(FlowerError):
            backend.keep_alive()
        assert not world.processes[1].lives
        world.answers = True
        world.now += 60
        backend.keep_alive()
        assert [process.lives for process in world.processes] == [False, False, True]
        assert world.events == [b"open"] * 2


def test_keys_are_not_registered_with_one_that_is_away(
    world: World, tmp_path: Path, made: Certificates
) -> None:
    with running_backend(tmp_path, Path("s"), somewhere(), made) as backend:
        world.processes[0].lives, world.answers = False, False
        with pytest.raises(FlowerError):
            backend.keep_alive()
        keys.add_site_keys(tmp_path / "keys", "c")
        world.processes[1].lives = False
        world.now += 1
        backend.keep_alive()
        assert world.names(tmp_path / "keys") == ["a", "b"]
        world.answers = True
        world.now += 60
        backend.keep_alive()
        assert world.names(tmp_path / "keys") == ["a", "b", "c"]


def test_one_that_dies_again_and_again_is_started_less_and_less_often(world: World, tmp_path: Path) -> None:
    with running_backend(tmp_path, Path("s"), somewhere(), None) as backend:
        world.answers = False
        for _ in range(300):
            world.processes[-1].lives = False
            before = len(world.processes)
            try:
                backend.keep_alive()
            except FlowerError:
                assert len(world.processes) == before + 1
            world.now += 1.0
    assert 10 < len(world.processes) < 20


def test_sites_are_registered_also_those_that_come_later(
    world: World, tmp_path: Path, made: Certificates
) -> None:
    with running_backend(tmp_path, Path("s"), somewhere(), made) as backend:
        assert world.names(tmp_path / "keys") == ["a", "b"]
        keys.add_site_keys(tmp_path / "keys", "c")
        world.now += 60
        backend.keep_alive()
        backend.keep_alive()
        assert world.names(tmp_path / "keys") == ["a", "b", "c"]
        backend.start_server(resume=False)
        assert "--sites" in world.commands[0]


def test_all_keys_are_registered_before_sites_can_connect(
    world: World, tmp_path: Path, made: Certificates
) -> None:
    with running_backend(tmp_path, Path("s"), somewhere(), made) as backend:
        assert world.events == ["register", "register", b"open"]
        world.processes[0].lives, world.keys = False, {}
        backend.keep_alive()
        assert world.events == ["register", "register", b"open"] * 2


def test_a_key_that_is_taken_out_of_the_folder_is_revoked(
    world: World, tmp_path: Path, made: Certificates
) -> None:
    with running_backend(tmp_path, Path("s"), somewhere(), made) as backend:
        shutil.rmtree(tmp_path / "keys" / "sites" / "a")
        for _ in range(2):
            assert len(world.keys) == 2
            world.now += 60
            backend.keep_alive()
        assert world.names(tmp_path / "keys") == ["b"]


def test_keys_that_are_missing_only_while_they_are_copied_are_not_revoked(
    world: World, tmp_path: Path, made: Certificates
) -> None:
    """Flower never accepts a key again that was revoked."""
    with running_backend(tmp_path, Path("s"), somewhere(), made) as backend:
        for name in ("sites/a", "sites"):
            away = (tmp_path / "keys" / name).rename(tmp_path / "away")
            world.now += 60
            backend.keep_alive()
            away.rename(tmp_path / "keys" / name)
            world.now += 60
            backend.keep_alive()
        (tmp_path / "keys" / "sites").rename(tmp_path / "away")  # nobody revokes all keys at once
        for _ in range(3):
            world.now += 60
            backend.keep_alive()
        assert len(world.keys) == 2


def test_a_renewed_certificate_is_used_without_a_new_run(
    world: World, tmp_path: Path, made: Certificates
) -> None:
    with running_backend(tmp_path, Path("s"), somewhere(), made) as backend:
        backend.keep_alive()
        assert len(world.processes) == 1
        keys.renew_certificates(tmp_path / "keys", 30)
        world.now += 60
        backend.keep_alive()
        assert [process.how for process in world.processes] == ["kill", ""]
        backend.keep_alive()
        assert len(world.processes) == 2


def test_a_renewed_certificate_that_cannot_be_used_does_not_end_the_superlink(
    world: World, tmp_path: Path, made: Certificates
) -> None:
    """As while the files are being copied, or if only one of them was."""
    with running_backend(tmp_path, Path("s"), somewhere(), made) as backend:
        for content in (b"", (tmp_path / "keys" / "helper.pem").read_bytes()):
            (tmp_path / "keys" / "server.pem").write_bytes(content)
            world.now += 60
            backend.keep_alive()
        assert [process.how for process in world.processes] == [""]


def test_a_damaged_key_neither_locks_out_other_sites_nor_is_revoked(
    world: World, tmp_path: Path, made: Certificates
) -> None:
    with running_backend(tmp_path, Path("s"), somewhere(), made) as backend:
        (tmp_path / "keys" / "sites" / "a" / "key.pub").write_bytes(b"half a k")
        keys.add_site_keys(tmp_path / "keys", "c")
        for _ in range(3):
            world.now += 60
            backend.keep_alive()
        assert len(world.keys) == 3  # of a, b and c
        world.processes[0].lives, world.keys = False, {}
        world.events.clear()
        backend.keep_alive()
        assert world.events == ["register", "register", b"open"]


def test_keys_at_a_superlink_of_others_are_left_to_them(
    world: World, tmp_path: Path, made: Certificates
) -> None:
    world.keys[b"another run's"] = 77
    with running_backend(tmp_path, Path("s"), SuperLinkAddress("server:8000", None), made):
        assert world.names(tmp_path / "keys") == ["?", "a", "b"]


def test_a_process_that_a_signal_stopped_is_continued_when_it_is_seen_twice(
    world: World, tmp_path: Path
) -> None:
    with running_backend(tmp_path, Path("s"), somewhere(), None) as backend:
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
    with running_backend(tmp_path, Path("s"), somewhere(), None) as backend:
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
    with running_backend(tmp_path, Path("s"), somewhere(), None) as backend:
        assert [backend.thaw() for _ in range(9)] == [[]] * 9
        assert len(world.processes) == 1


def test_a_superlink_of_others_is_not_ended(world: World, tmp_path: Path, made: Certificates) -> None:
    world.health = "timed out"
    with running_backend(tmp_path, Path("s"), SuperLinkAddress("server:8000", None), made) as backend:
        assert [backend.thaw() for _ in range(9)] == [[]] * 9
