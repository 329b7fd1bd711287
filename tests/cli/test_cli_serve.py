"""`offbeat serve` and `offbeat join`: what is refused before anything is started, and what is told."""

import json
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.cli import deploy as serve_command
from offbeat.cli import main
from offbeat.deploy import keys
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.server.run import SET_ASIDE_FILE, ServeOutcome, write_outcome

TASK = """
import torch
from offbeat import Examples, LearningTask

def load(name):
    return Examples(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))

def task():
    return LearningTask(module=lambda: torch.nn.Linear(3, 2), data=load)

def broken():
    return LearningTask(module=lambda: 1 / 0, data=load)
"""
SETTINGS = """
[task]
function = "cli_task:task"
[training]
algorithm = "fedbuff"
clients = 4
rounds = 3
"""
JOIN = "join --superlink 127.0.0.1:23999 --task cli_task:task"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "cli_task.py").write_text(TASK)
    (tmp_path / "serve.toml").write_text(SETTINGS)
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    keys.create_keys(folder, ["localhost"], ["a"], ["localhost"], 3)
    return folder


class Acted:
    """A Flower whose server ends at once, in the way it is told to."""

    def __init__(self, folder: Path, outcome: ServeOutcome) -> None:
        self.folder, self.outcome = folder, outcome

    def keep_alive(self) -> None: ...

    def start_server(self, *, resume: bool) -> None:
        (self.folder / "settings.json").write_text(
            json.dumps(ServeConfig.read(Path("serve.toml")).settings())
        )
        record = {"version": 3, "time": 12.5, "client_updates": 6, "accuracy": 0.75, "staleness_mean": 0.5}
        (self.folder / "records.jsonl").write_text(json.dumps(record) + "\n")
        told = [
            {"event": "joined", "name": "hospital", "client": 1},
            {"event": "rejected", "node": 4, "client": None, "reason": "size", "sentence": "too large"},
            {"event": "sent", "client": 1},
        ]
        (self.folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told))
        (self.folder / "model.safetensors").touch()
        write_outcome(self.folder, self.outcome)

    def is_server_alive(self) -> bool:
        return False

    def stop_server(self) -> None: ...


Act = Callable[[ServeOutcome], list[tuple[Any, ...]]]


@pytest.fixture
def act(monkeypatch: pytest.MonkeyPatch) -> Act:
    """Puts a made-up Flower in the place of the real one; gives what it was started with."""
    asked: list[tuple[Any, ...]] = []

    def put(outcome: ServeOutcome) -> list[tuple[Any, ...]]:
        @contextmanager
        def held(folder: Path, *words: Any) -> Iterator[Acted]:
            asked.append((folder, *words))
            yield Acted(folder, outcome)

        monkeypatch.setattr(serve_command, "Backend", held)
        return asked

    return put


def fails(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(words)) == 2
    said = capsys.readouterr().err
    assert said.startswith("offbeat: ")
    assert said.count("\n") == 1
    return said


def test_a_run_is_told_line_by_line(here: Path, act: Act, capsys: pytest.CaptureFixture[str]) -> None:
    asked = act(ServeOutcome(3))
    assert main(shlex.split("serve serve.toml --port 23998 --out run")) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "fedbuff: 3 server steps of 2 updates, 4 sites; the run is in run",
        "a site joins by",
        "  offbeat join --superlink 127.0.0.1:23998 --insecure --task cli_task:task --name NAME",
        "version 3  12 s  6 updates  accuracy 0.75  staleness 0.5",
        "model: run/model.safetensors",
    ]
    assert said.err.splitlines() == [
        "offbeat: hospital joined as client 1",
        "offbeat: rejected from node 4 (size): too large",
    ]
    assert asked == [(Path("run"), Path("serve.toml"), ("127.0.0.1", 23998), None)]


def test_sites_are_not_told_an_address_that_is_nobodys(
    act: Act, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    act(ServeOutcome(3))
    monkeypatch.setattr("platform.node", lambda: "server.example")
    assert main(shlex.split("serve serve.toml --host 0.0.0.0 --port 23998")) == 0
    assert "--superlink server.example:23998" in capsys.readouterr().out


def test_the_line_for_sites_says_how_they_are_known(
    act: Act, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    act(ServeOutcome(3))
    assert main(shlex.split(f"serve serve.toml --port 23998 --certificates {made}")) == 0
    out = capsys.readouterr().out
    assert "join --superlink 127.0.0.1:23998 --certificate ca.crt --key key --task cli_task:task" in out
    assert "runs/serve-fedbuff-1" in out


def test_a_stopped_run_says_how_to_go_on(act: Act, capsys: pytest.CaptureFixture[str]) -> None:
    act(ServeOutcome(2, stopped=True))
    words = "serve serve.toml --port 23998 --out 'a run' --json"
    assert main(shlex.split(words)) == 130
    said = capsys.readouterr()
    again = "offbeat serve serve.toml --out 'a run' --resume --port 23998"
    assert again in said.err
    told = json.loads(said.out.splitlines()[-1])
    assert (told["resume"], told["finished"], told["version"]) == (again, False, 2)
    assert told["last"]["accuracy"] == 0.75


def test_a_run_that_failed_says_why(act: Act, capsys: pytest.CaptureFixture[str]) -> None:
    act(ServeOutcome(2, error="the loss became NaN."))
    assert main(shlex.split("serve serve.toml --port 23998 --out run")) == 1
    assert "offbeat: the loss became NaN.\n" in capsys.readouterr().err


def test_a_run_that_had_finished_is_not_started(act: Act, capsys: pytest.CaptureFixture[str]) -> None:
    asked = act(ServeOutcome(3))
    assert main(shlex.split("serve serve.toml --port 23998 --out run")) == 0
    assert main(shlex.split("serve serve.toml --port 23998 --out run --resume")) == 0
    assert len(asked) == 1
    assert "had finished already" in capsys.readouterr().err


def test_resumed_settings_must_be_the_same(here: Path, act: Act, capsys: pytest.CaptureFixture[str]) -> None:
    act(ServeOutcome(2, stopped=True))
    main(shlex.split("serve serve.toml --port 23998 --out run"))
    capsys.readouterr()
    (here / "serve.toml").write_text(SETTINGS.replace("rounds = 3", "rounds = 4"))
    said = fails("serve serve.toml --port 23998 --out run --resume", capsys)
    assert "was started with other settings (rounds was 3 and is now 4): give these as they were" in said
    (here / "serve.toml").write_text(f"{SETTINGS}[network]\ndeadline = 5\n")  # which may change
    assert main(shlex.split("serve serve.toml --port 23998 --out run --resume")) == 130


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("serve", "the following arguments are required: SETTINGS"),
        ("serve none.toml", "there is no settings file none.toml"),
        ("serve serve.toml --superlink a:1", "--superlink is gone, since 'offbeat serve' starts a SuperLink"),
        ("serve serve.toml --port 0", "--port must be from 1 to 65535, not 0."),
        ("serve serve.toml --resume", "--resume needs --out"),
        ("serve serve.toml --set-aside", "--set-aside is for a resumed run"),
        ("serve serve.toml --resume --out none", "none contains no run to resume"),
        ("serve serve.toml --certificates none", "there is no file none/server.pem"),
        ("serve serve.toml --prot 1", "unknown option '--prot': did you mean --port"),
        ("join", "the following arguments are required: --superlink"),
        ("join --superlink 127.0.0.1:23999 --insecure", "--task is missing: give package.module:function"),
        (JOIN, "--certificate is missing, which identifies the server: give it, or --insecure."),
        (f"{JOIN} --insecure --key serve.toml", "--insecure excludes --certificate and --key"),
        (f"{JOIN} --certificate none.crt", "none.crt cannot be read"),
        (f"{JOIN} --insecure --name 'a b'", "'a b' cannot be the name of a site"),
        (f"{JOIN} --insecure --helper-key none", "none cannot be read"),
        (f"{JOIN} --insecure --minimum 1", "a secure sum over 1 sites hides no site"),
        ("join --superlink a --task b:c --insecure", "--superlink must be an address such as"),
        (
            "join --superlink 127.0.0.1:23999 --insecure --data cli_task:load",
            "--data is now a part of the task: give --task, package.module:function, which returns an "
            "offbeat.LearningTask.",
        ),
        ("join --superlink 127.0.0.1:23999 --losses cli_task:load", "--losses is now a part of the task"),
    ],
)
def test_bad_words_are_one_sentence_and_leave_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    before = sorted(here.iterdir())
    said = fails(words, capsys)
    assert sentence in said
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ("cli_task:task", "no_task:task"),
            "serve.toml: there is no module 'no_task' for function of [task]",
        ),
        (("cli_task:task", "cli_task:broken"), "the model could not be created"),
        (
            ('function = "cli_task:task"', 'module = "cli_task:load"'),
            "module of [task] is now a part of the task: give function of [task]",
        ),
        (('"fedbuff"', '"fedasync"\nbuffer = 9'), "buffer"),
        (("clients = 4", "clients = 4\ndevice = 'cuda:99'"), "the device 'cuda:99' is not available"),
        (("clients = 4", "clients = 4\nprecision = 'tf32'"), "a CPU does not round products to tf32"),
        (("clients = 4", "clients = 4\nweights = 'fading'"), "fading"),
    ],
)
def test_settings_that_the_server_would_refuse_are_refused_here(
    here: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], sentence: str, act: Act
) -> None:
    asked = act(ServeOutcome(3))
    (here / "serve.toml").write_text(SETTINGS.replace(*change))
    assert sentence in fails("serve serve.toml --port 23998", capsys)
    assert asked == []
    assert not (here / "runs").exists()


def test_methods_whose_clients_know_their_staleness_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "serve.toml").write_text(SETTINGS.replace("fedbuff", "weight-prediction"))
    assert "which is not known before it arrives" in fails("serve serve.toml --port 23998", capsys)


def test_a_port_in_use_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = fails(f"serve serve.toml --port {port}", capsys)
        assert f"port {port} of 127.0.0.1 is in use: choose another with --port." in said
        (here / "serve.toml").write_text(f"{SETTINGS}[watch]\nport = {port}\n")
        assert "with port of [watch]" in fails("serve serve.toml --port 23998", capsys)
    assert not (here / "runs").exists()


def test_a_setting_that_is_gone_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "serve.toml").write_text(f"{SETTINGS}[network]\npoll = 0.5\n")
    assert "poll of [network] is gone, since the server is told when" in fails("serve serve.toml", capsys)


def test_start_is_still_accepted(act: Act) -> None:
    """It was needed once."""
    act(ServeOutcome(3))
    assert main(shlex.split("serve serve.toml --start --port 23998")) == 0


def test_a_folder_that_holds_a_run_is_left_alone(act: Act, capsys: pytest.CaptureFixture[str]) -> None:
    act(ServeOutcome(3))
    main(shlex.split("serve serve.toml --port 23998 --out run"))
    capsys.readouterr()
    said = fails("serve serve.toml --port 23998 --out run", capsys)
    assert "run already holds a run: name another --out, or add --resume." in said


def test_a_simulation_is_not_resumed_as_a_deployment(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run").mkdir()
    (here / "run" / "settings.json").write_text('{"algorithm": "fedbuff", "data": "digits"}')
    assert "is a simulation" in fails("serve serve.toml --port 23998 --out run --resume", capsys)


def test_a_site_is_joined_with_what_was_given(
    here: Path, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def keep(own: Any, link: Any, say: Any, stop: Any, ready: Any) -> None:
        asked.extend((own, link))
        ready(SimpleNamespace(examples=1234))
        say("it is so.")

    monkeypatch.setattr("offbeat.deploy.flower.site.run_site", keep)
    trust = f"--certificate {made / 'ca.crt'} --key {made / 'sites' / 'a' / 'key'}"
    assert main(shlex.split(f"{JOIN} {trust} --name hospital --json")) == 0
    own, link = asked
    folder = here / "state" / "offbeat" / "sites" / "hospital"
    assert (own.name, own.folder, own.task) == ("hospital", folder, "cli_task:task")
    assert own.key == made / "sites" / "a" / "key"
    assert link == ("127.0.0.1:23999", made / "ca.crt")
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == f"hospital: 1,234 examples; its state is in {folder}"
    assert json.loads(said.out.splitlines()[1])["name"] == "hospital"
    assert said.err == "offbeat: it is so.\n"


def test_a_task_that_cannot_be_found_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    said = fails("join --superlink 127.0.0.1:23999 --insecure --task no_such.data:task --name a", capsys)
    assert "there is no module 'no_such' for --task" in said


def test_a_file_that_is_no_token_is_refused_before_anything_is_started(
    here: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secure = f'[secure]\nhelper = "https://localhost:9"\ntoken = "{made / "ca.crt"}"\nminimum = 2\n'
    (here / "serve.toml").write_text(f"{SETTINGS}{secure}")
    said = fails("serve serve.toml --port 23999", capsys)
    assert "ca.crt does not contain a token" in said
    assert not (here / "runs").exists()


def test_a_server_is_asked_to_set_aside_by_a_file_in_its_folder(here: Path, act: Act) -> None:
    act(ServeOutcome(1, stopped=True))
    words = "serve serve.toml --port 23998 --out run"
    main(shlex.split(words))
    assert not (here / "run" / SET_ASIDE_FILE).exists()
    main(shlex.split(f"{words} --resume --set-aside"))
    assert (here / "run" / SET_ASIDE_FILE).exists()
    main(shlex.split(f"{words} --resume"))
    assert not (here / "run" / SET_ASIDE_FILE).exists()
