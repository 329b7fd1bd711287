"""A server with real sites at the other end of a post in memory: it runs, stops, resumes, and leaves word."""

import errno
import json
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from offbeat import Examples
from offbeat.algorithms import find
from offbeat.deploy import keys
from offbeat.deploy.protocol.transport import Reply
from offbeat.deploy.server.run import (
    SET_ASIDE_FILE,
    STOP_FILE,
    ServeOutcome,
    ServeRequest,
    read_outcome,
    read_server,
    serve,
)
from offbeat.deploy.site.site import Site
from offbeat.training import checkpoint
from offbeat.training.folder import read_jsonl

TASK = """
import torch
from offbeat import Examples

def module():
    return torch.nn.Linear(3, 2)

def test():
    generator = torch.Generator().manual_seed(9)
    inputs = torch.randn(20, 3, generator=generator)
    return Examples(inputs, (inputs.sum(1) > 0).long())
"""
SETTINGS = """
[task]
module = "served_task:module"
test = "served_task:test"
[training]
algorithm = "fedbuff"
clients = 2
buffer = 2
rounds = 6
eval_every = 2
local_steps = 3
batch_size = 4
[network]
poll = 0.002
"""


def load(name: str) -> Examples:
    generator = torch.Generator().manual_seed(len(name))
    inputs = torch.randn(12, 3, generator=generator)
    return Examples(inputs, (inputs.sum(1) > 0).long())


class AtOnce:
    """Sites that answer as soon as they are asked."""

    def __init__(self, sites: dict[int, Site], after: Callable[[int], None] = lambda count: None) -> None:
        self.sites = sites
        self.after = after
        self.answers: dict[str, Reply] = {}
        self.tasks = self.count = 0

    def nodes(self) -> frozenset[int]:
        self.after(self.tasks)
        return frozenset(self.sites)

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        self.count += 1
        self.tasks += kind == "task"
        number = str(self.count)
        self.answers[number] = Reply(number, node, *self.sites[node].answer(kind, header, payload), None)
        return number

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        self.after(self.tasks)
        return [self.answers.pop(number) for number in message_ids if number in self.answers]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "served_task.py").write_text(TASK)
    return folder


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server adds the folder of its settings to where modules are looked for."""
    monkeypatch.setattr("sys.path", list(sys.path))


@pytest.fixture
def settings(home: Path) -> Path:
    path = home / "serve.toml"
    path.write_text(SETTINGS)
    return path


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[dict[int, Site]]:
    with (
        closing(Site("one", tmp_path / "one", load, lambda: nn.Linear(3, 2))) as one,
        closing(Site("three", tmp_path / "three", load, lambda: nn.Linear(3, 2))) as three,
    ):
        yield {11: one, 12: three}


def ask(settings: Path, folder: Path, *, resume: bool = False) -> ServeRequest:
    return ServeRequest(settings, folder, resume, authenticated=False)


def versions(folder: Path) -> list[int]:
    return [record["version"] for record in read_jsonl(folder, "records")]


def stop_after_five(folder: Path) -> Callable[[int], None]:
    """Asks the run in this folder to stop when its fifth task is handed out."""

    def stop(tasks: int) -> None:
        if tasks >= 5:
            (folder / STOP_FILE).touch()

    return stop


def test_a_run_ends_with_a_model_and_leaves_word(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    folder = tmp_path / "run"
    outcome = serve(ask(settings, folder), lambda max_bytes: AtOnce(sites))
    assert outcome == read_outcome(folder) == ServeOutcome(6)
    assert versions(folder) == [0, 2, 4, 6]
    assert all("accuracy" in record for record in read_jsonl(folder, "records"))
    model = load_file(folder / "model.safetensors")
    saved = checkpoint.load(folder / "checkpoint" / "state.safetensors").tensors
    assert model.keys() == {"weight", "bias"}
    assert torch.equal(torch.cat([model["weight"].reshape(-1), model["bias"]]), saved["state.0"])
    kept = json.loads((folder / "settings.json").read_text())
    assert kept["task"]["module"] == "served_task:module"
    assert kept["resolved"]["model_size"] == 8
    assert read_server(folder) is not None


def test_the_first_weights_follow_from_the_seed(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    settings.write_text(SETTINGS.replace("rounds = 6", "rounds = 1"))
    losses = []
    for name in ("a", "b"):
        serve(ask(settings, tmp_path / name), lambda max_bytes: AtOnce(sites))
        losses.append(next(read_jsonl(tmp_path / name, "records"))["loss"])
    assert losses[0] == losses[1]


def test_without_test_data_nothing_is_measured(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    settings.write_text(SETTINGS.replace('test = "served_task:test"\n', ""))
    folder = tmp_path / "run"
    assert serve(ask(settings, folder), lambda max_bytes: AtOnce(sites)).error is None
    (first, *_) = read_jsonl(folder, "records")
    assert not {"accuracy", "loss"} & first.keys()
    assert (folder / "model.safetensors").exists()


def test_a_stop_in_the_middle_of_a_buffer_is_resumed(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    folder = tmp_path / "run"
    stop = stop_after_five(folder)
    outcome = serve(ask(settings, folder), lambda max_bytes: AtOnce(sites, stop))
    assert outcome.stopped
    assert outcome.version is not None
    assert outcome.version < 6
    assert not (folder / STOP_FILE).exists()
    assert (folder / "model.safetensors").exists()
    again = serve(ask(settings, folder, resume=True), lambda max_bytes: AtOnce(sites))
    assert again == ServeOutcome(6)
    assert versions(folder) == [0, 2, 4, 6]


def test_a_kill_leaves_no_word_and_is_resumed(settings: Path, tmp_path: Path, sites: dict[int, Site]) -> None:
    folder = tmp_path / "run"

    def kill(count: int) -> None:
        if count >= 5:
            raise SystemExit

    with pytest.raises(SystemExit):
        serve(ask(settings, folder), lambda max_bytes: AtOnce(sites, kill))
    assert read_outcome(folder) is None
    assert serve(ask(settings, folder, resume=True), lambda max_bytes: AtOnce(sites)) == ServeOutcome(6)


def test_a_run_that_had_finished_finishes_again_without_sites(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    folder = tmp_path / "run"
    serve(ask(settings, folder), lambda max_bytes: AtOnce(sites))
    (folder / "model.safetensors").unlink()
    assert serve(ask(settings, folder, resume=True), lambda max_bytes: AtOnce({})) == ServeOutcome(6)
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("rounds = 6", "rounds = 7"), "was started with other settings (rounds was 6 and is now 7)"),
        (("served_task:module", "served_task:nothing"), "has no 'nothing'"),
        (("buffer = 2", "bufer = 2"), "did you mean buffer?"),
    ],
)
def test_bad_settings_are_an_outcome_in_one_sentence(
    settings: Path, tmp_path: Path, sites: dict[int, Site], change: tuple[str, str], sentence: str
) -> None:
    folder = tmp_path / "run"
    serve(ask(settings, folder), lambda max_bytes: AtOnce(sites))
    settings.write_text(SETTINGS.replace(*change))
    outcome = serve(ask(settings, folder, resume=True), lambda max_bytes: AtOnce(sites))
    assert outcome.error is not None
    assert sentence in outcome.error
    assert read_outcome(folder) == outcome


def test_a_page_whose_port_is_taken_does_not_end_the_run(
    settings: Path, tmp_path: Path, sites: dict[int, Site], caplog: pytest.LogCaptureFixture
) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings.write_text(f"{SETTINGS}[watch]\nport = {taken.getsockname()[1]}\n")
        assert serve(ask(settings, tmp_path / "run"), lambda max_bytes: AtOnce(sites)).error is None
    assert "there is no live page" in caplog.text


@pytest.mark.parametrize(("method", "clip"), [("fedbuff", "clip = 1.0\n"), ("cadence", "")])
def test_a_private_run_keeps_its_noise_and_tells_what_it_spent(
    settings: Path, tmp_path: Path, sites: dict[int, Site], method: str, clip: str
) -> None:
    folder = tmp_path / "run"
    privacy = f"[privacy]\n{clip}epsilon = 50.0\ndelta = 1e-5\nmax_participations = 6\naccountant = 'rdp'\n"
    settings.write_text(SETTINGS.replace('"fedbuff"', f'"{method}"') + privacy)

    stop = stop_after_five(folder)
    assert serve(ask(settings, folder), lambda max_bytes: AtOnce(sites, stop)).stopped
    kept = json.loads((folder / "settings.json").read_text())
    assert kept["resolved"]["noise"] > 0
    assert kept["parameters"] == dict((*find(method).private_defaults, *find(method).unclipped_defaults))
    outcome = serve(ask(settings, folder, resume=True), lambda max_bytes: AtOnce(sites))
    assert outcome.version == 6
    assert outcome.spent is not None
    assert 0 < outcome.spent["epsilon"] <= 50


def test_a_disk_that_is_full_ends_the_run_with_a_sentence(
    settings: Path, tmp_path: Path, sites: dict[int, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    save, count = checkpoint.save, iter(range(100))

    def fail(path: Path, state: checkpoint.Checkpoint) -> None:
        if next(count) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", "state.safetensors")
        save(path, state)

    monkeypatch.setattr("offbeat.training.checkpoint.save", fail)
    outcome = serve(ask(settings, tmp_path / "run"), lambda max_bytes: AtOnce(sites))
    assert outcome.error is not None
    assert "state.safetensors cannot be written (No space left on device)" in outcome.error
    assert read_outcome(tmp_path / "run") == outcome
    assert serve(ask(settings, tmp_path / "run", resume=True), lambda max_bytes: AtOnce(sites)).version == 6


def test_a_run_of_sites_with_keys_does_not_go_on_with_sites_that_have_none(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    folder = tmp_path / "run"
    stop = stop_after_five(folder)
    keyed = ServeRequest(settings, folder, False, authenticated=True)
    assert serve(keyed, lambda max_bytes: AtOnce(sites, stop)).stopped
    strangers = AtOnce({node + 80: site for node, site in sites.items()})  # as good as any who know the names
    outcome = serve(ask(settings, folder, resume=True), lambda max_bytes: strangers)
    assert outcome.error is not None
    assert "resume it with --certificates" in outcome.error
    assert strangers.tasks == 0
    assert serve(keyed._replace(resume=True), lambda max_bytes: AtOnce(sites)).version == 6


def test_a_run_does_not_go_on_without_knowing_which_site_is_which_client(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    folder = tmp_path / "run"
    stop = stop_after_five(folder)
    assert serve(ask(settings, folder), lambda max_bytes: AtOnce(sites, stop)).stopped
    roster = (folder / "roster.json").rename(tmp_path / "elsewhere")
    outcome = serve(ask(settings, folder, resume=True), lambda max_bytes: AtOnce(sites))
    assert outcome.error is not None
    assert "roster.json does not have all clients of this run" in outcome.error
    roster.rename(folder / "roster.json")
    assert serve(ask(settings, folder, resume=True), lambda max_bytes: AtOnce(sites)).version == 6


class Poisoned(AtOnce):
    """One site answers one task with numbers that are finite, and as large as can be."""

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        number = super().push(node, kind, header, payload, timeout)
        reply = self.answers[number]
        if kind == "task" and self.tasks == 5:
            poison = struct.pack("<f", 3e38) * (len(reply.payload) // 4)
            self.answers[number] = reply._replace(payload=poison)
        return number


def test_a_run_that_diverged_goes_on_without_the_uploads_that_made_it(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    text = settings.read_text().replace("eval_every = 2", "eval_every = 1")
    settings.write_text(f"{text}max_update_norm = 0\n")
    folder = tmp_path / "run"
    first = serve(ask(settings, folder), lambda max_bytes: Poisoned(sites))
    assert first.error is not None
    assert "NaN or infinite at server step" in first.error
    assert "its updates came from client" in first.error
    assert "resume it with --set-aside" in first.error
    again = serve(ask(settings, folder, resume=True), lambda max_bytes: AtOnce(sites))
    assert again.error == first.error
    (folder / SET_ASIDE_FILE).touch()
    assert serve(ask(settings, folder, resume=True), lambda max_bytes: AtOnce(sites)).version == 6
    assert not (folder / SET_ASIDE_FILE).exists()
    assert versions(folder) == list(range(7))
    told = [line for line in read_jsonl(folder, "events") if line["event"] == "set_aside"]
    assert len(told) == len(list((folder / "journal" / "set-aside").iterdir())) == 2
    assert list(read_jsonl(folder, "records"))[-1]["lost"] >= 2  # and what was at sites when it ended


def test_the_same_upload_does_no_harm_where_its_length_is_looked_at(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    assert serve(ask(settings, tmp_path / "run"), lambda max_bytes: Poisoned(sites)) == ServeOutcome(6)
    rejected = [line for line in read_jsonl(tmp_path / "run", "events") if line["event"] == "rejected"]
    assert [line["reason"] for line in rejected] == ["norm"]


class Keyed(AtOnce):
    """Its nodes came by keys."""

    def key(self, node: int) -> bytes:
        return b"nobody's"


def test_a_name_is_for_whoever_has_its_key(settings: Path, tmp_path: Path, sites: dict[int, Site]) -> None:
    folder, known = tmp_path / "run", tmp_path / "sites"
    keys.add_site_keys(made_keys(tmp_path), "three")
    shutil.copytree(tmp_path / "keys" / "sites", known)

    def stop(tasks: int) -> None:
        if (folder / "events.jsonl").exists() and "rejected" in (folder / "events.jsonl").read_text():
            (folder / STOP_FILE).touch()

    asked = ServeRequest(settings, folder, False, authenticated=True, sites=known)
    assert serve(asked, lambda max_bytes: Keyed(sites, stop)).stopped
    roster = json.loads((folder / "roster.json").read_text())
    assert [member["name"] for member in roster.values()] == ["one"]


def made_keys(place: Path) -> Path:
    keys.create_keys(place / "keys", ["server.example"], ["two"], ["helper.example"], 2)
    return place / "keys"
