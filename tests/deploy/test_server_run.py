"""A server with real sites at the other end of a post in memory: it runs, stops, resumes, and leaves word."""

import errno
import json
import re
import shutil
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from safetensors.torch import load_file
from torch import nn

from deploy_world import retell
from offbeat import Examples, Population, Problem, Setting, Steps, build, trees
from offbeat.algorithms import find
from offbeat.deploy import keys
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.protocol.transport import Reply
from offbeat.deploy.server import run
from offbeat.deploy.server.run import (
    SET_ASIDE_FILE,
    STOP_FILE,
    ServeOutcome,
    ServeRequest,
    check_run_folder,
    read_outcome,
)
from offbeat.deploy.site.site import Site
from offbeat.nn.problem import cross_entropies
from offbeat.schedule.staleness import parse_weights
from offbeat.training import checkpoint
from offbeat.training.folder import read_jsonl
from offbeat.training.method import build_method
from offbeat.training.task import seeded_module
from secure_world import KEY, TOKEN, new_desk, served

serve = partial(run.serve, sleep=lambda seconds: time.sleep(min(seconds, 0.002)))

TASK = """
import torch
from offbeat import Examples, LearningTask

def module():
    return torch.nn.Linear(3, 2)

def task():
    return LearningTask(module=module, data=dict, test=test)

def untested():
    return LearningTask(module=module, data=dict)

def test():
    generator = torch.Generator().manual_seed(9)
    inputs = torch.randn(20, 3, generator=generator)
    return Examples(inputs, (inputs.sum(1) > 0).long())
"""
SETTINGS = """
[task]
function = "served_task:task"
[training]
algorithm = "fedbuff"
clients = 2
buffer = 2
rounds = 6
eval_every = 2
local_steps = 3
batch_size = 4
"""


def load(name: str) -> Examples:
    generator = torch.Generator().manual_seed(len(name))
    inputs = torch.randn(12, 3, generator=generator)
    return Examples(inputs, (inputs.sum(1) > 0).long())


@cache
def node_key(node: int) -> bytes:
    """The public key of a node, which no site has registered."""
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class AtOnce:
    """Sites that answer as soon as they are asked."""

    backlog: frozenset[str] = frozenset()

    def __init__(self, sites: dict[int, Site], after: Callable[[int], None] = lambda count: None) -> None:
        self.sites = sites
        self.after = after
        self.answers: dict[str, Reply] = {}
        self.tasks = self.count = 0

    def nodes(self) -> frozenset[int]:
        self.after(self.tasks)
        return frozenset(self.sites)

    def key(self, node: int) -> bytes:
        return node_key(node)

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
    assert kept["task"]["function"] == "served_task:task"
    assert kept["resolved"]["model_size"] == 8


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
    settings.write_text(SETTINGS.replace("served_task:task", "served_task:untested"))
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
        (("served_task:task", "served_task:nothing"), "has no 'nothing'"),
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


def test_a_full_disk_is_named_and_leaves_a_run_that_can_be_resumed(
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
    assert "state.safetensors cannot be written because the disk is full: free some space" in outcome.error
    assert read_outcome(tmp_path / "run") is None  # the run is not over: whoever started it waits for space
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
    settings.write_text(f"{text}[network]\nmax_update_norm = 0\n")
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


@pytest.mark.parametrize("algorithm", ["fedbuff", "cadence"])
def test_a_private_run_clips_a_long_upload_and_neither_rejects_it_nor_tells_its_norm(
    settings: Path, tmp_path: Path, sites: dict[int, Site], algorithm: str
) -> None:
    """The norms of some uploads would otherwise decide whether another one enters the sum."""
    clip = "clip = 1.0\n" if algorithm == "fedbuff" else ""
    text = re.sub(r'algorithm = "\w+"', f'algorithm = "{algorithm}"', settings.read_text())
    table = "noise = 0.5\ndelta = 1e-3\nmax_participations = 50\n"
    settings.write_text(f"{text}\n[privacy]\n{clip}{table}")
    assert serve(ask(settings, tmp_path / "run"), lambda max_bytes: Poisoned(sites)).version == 6
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"rejected"' not in events
    assert "norm" not in events


def test_a_leader_that_runs_one_plan_twice_gets_sums_once(settings: Path, tmp_path: Path) -> None:
    """The updates of the first version would be the same, and two sums over almost the same sites differ."""
    (tmp_path / "helper.token").write_text(TOKEN)
    (tmp_path / "helper.pub").write_text(KEY.public_key().public_bytes_raw().hex())
    trust = {"helper_key": tmp_path / "helper.pub", "minimum": 2}
    text = settings.read_text().replace('"fedbuff"', '"fedbuff"\nweights = "constant"')
    with (
        served(new_desk(tmp_path / "store")) as url,
        closing(Site("one", tmp_path / "one", load, lambda: nn.Linear(3, 2), **trust)) as one,
        closing(Site("three", tmp_path / "three", load, lambda: nn.Linear(3, 2), **trust)) as three,
    ):
        sites = {11: one, 12: three}
        helper = f'helper = "{url}"\ntoken = "{tmp_path / "helper.token"}"\nminimum = 2\nsigned = false\n'
        settings.write_text(f"{text}[secure]\n{helper}")
        assert serve(ask(settings, tmp_path / "first"), lambda max_bytes: AtOnce(sites)) == ServeOutcome(6)
        second = serve(ask(settings, tmp_path / "second"), lambda max_bytes: AtOnce(sites))
        assert second.error is not None
        assert "another run has sent" in second.error
        settings.write_text(settings.read_text().replace("rounds = 6", "rounds = 6\nseed = 5"))
        assert serve(ask(settings, tmp_path / "third"), lambda max_bytes: AtOnce(sites)) == ServeOutcome(6)


def test_a_name_is_for_whoever_has_its_key(settings: Path, tmp_path: Path, sites: dict[int, Site]) -> None:
    folder, known = tmp_path / "run", tmp_path / "sites"
    keys.add_site_keys(made_keys(tmp_path), "three")
    shutil.copytree(tmp_path / "keys" / "sites", known)

    def stop(tasks: int) -> None:
        if (folder / "events.jsonl").exists() and "rejected" in (folder / "events.jsonl").read_text():
            (folder / STOP_FILE).touch()

    asked = ServeRequest(settings, folder, False, authenticated=True, sites=known)
    assert serve(asked, lambda max_bytes: AtOnce(sites, stop)).stopped
    roster = json.loads((folder / "roster.json").read_text())
    assert [member["name"] for name, member in roster.items() if name != "checksum"] == ["one"]


class Forged(AtOnce):
    """The first upload is signed by another than the node that it was asked of."""

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        replies = super().pull(message_ids)
        forged = not (self.forged or not any(reply.payload for reply in replies))
        self.forged |= forged
        return [each._replace(authentic=not (forged and each.payload)) for each in replies]

    forged = False


def test_an_upload_that_another_site_signed_does_not_count(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    folder = tmp_path / "run"
    network = Forged(sites)
    assert serve(ask(settings, folder), lambda max_bytes: network).version == 6
    assert network.forged
    events = list(read_jsonl(folder, "events"))
    rejected = [line for line in events if line["event"] == "rejected"]
    assert {line["reason"] for line in rejected} == {"signature"}
    tasks = [tuple(task[:3]) for line in read_jsonl(folder, "trace") for task in line["tasks"]]
    lost = {(e["client"], e["version"], e["visit"]) for e in events if e["event"] == "lost"}
    assert lost
    assert not lost & set(tasks)


class ForgedGreeting(AtOnce):
    """Nobody signs greetings with the key of the node."""

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        return [each._replace(authentic=False) for each in super().pull(message_ids)]


def test_a_site_whose_greeting_another_signed_is_not_admitted(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    folder = tmp_path / "run"

    def stop(tasks: int) -> None:
        if (folder / "events.jsonl").exists() and "rejected" in (folder / "events.jsonl").read_text():
            (folder / STOP_FILE).touch()

    network = ForgedGreeting(sites, stop)
    assert serve(ask(settings, folder), lambda max_bytes: network).stopped
    assert network.tasks == 0
    rejected = [line for line in read_jsonl(folder, "events") if line["event"] == "rejected"]
    assert {line["reason"] for line in rejected} == {"signature"}


def made_keys(place: Path) -> Path:
    keys.create_keys(place / "keys", ["server.example"], ["two"], ["helper.example"], 2)
    return place / "keys"


@pytest.mark.parametrize("source", ["helper", "both"])
def test_a_deployed_run_has_its_noise_from_the_helper(settings: Path, tmp_path: Path, source: str) -> None:
    (tmp_path / "helper.token").write_text(TOKEN)
    (tmp_path / "helper.pub").write_text(KEY.public_key().public_bytes_raw().hex())
    trust = {"helper_key": tmp_path / "helper.pub", "minimum": 2}
    text = settings.read_text().replace('"fedbuff"', '"fedbuff"\nweights = "constant"')
    table = f'clip = 1.0\nnoise = 2.0\ndelta = 1e-3\nmax_participations = 6\nnoise_source = "{source}"\n'
    with (
        served(new_desk(tmp_path / "store")) as url,
        closing(Site("one", tmp_path / "one", load, lambda: nn.Linear(3, 2), **trust)) as one,
        closing(Site("three", tmp_path / "three", load, lambda: nn.Linear(3, 2), **trust)) as three,
    ):
        helper = f'helper = "{url}"\ntoken = "{tmp_path / "helper.token"}"\nminimum = 2\nsigned = false\n'
        settings.write_text(f"{text}[secure]\n{helper}[privacy]\n{table}")
        sites, folder = {11: one, 12: three}, tmp_path / "run"
        assert serve(ask(settings, folder), lambda max_bytes: AtOnce(sites)).version == 6
        # the same plan again is another run with other noise, whose epsilon adds up
        assert serve(ask(settings, tmp_path / "again"), lambda max_bytes: AtOnce(sites)).version == 6
    with sqlite3.connect(tmp_path / "store") as store:
        rows = store.execute("SELECT count(*), max(version) FROM participations GROUP BY run").fetchall()
    store.close()
    assert rows == [(12, 5), (12, 5)]
    saved = checkpoint.load(folder / "checkpoint" / "state.safetensors").facts["aggregate"]["spent"]
    assert saved["accountant"] == "rdp"
    expected = {"helper": "not against the helper", "both": "against each of them where the other"}[source]
    assert expected in saved["terms"]
    models = [load_file(tmp_path / run / "model.safetensors") for run in ("run", "again")]
    assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])


HARMS: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: path.write_bytes(flipped(path.read_bytes(), len(path.read_bytes()) // 2)),
    "flipped at its end": lambda path: path.write_bytes(flipped(path.read_bytes(), -2)),
}
# Nothing in these is needed in order to continue.
UNNEEDED = {"lock", "server.lock", "events.jsonl", "model.safetensors", "previous.safetensors", "stop"}


def flipped(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[place] ^= 2
    return bytes(changed)


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS)
def test_whatever_file_of_a_run_is_harmed_it_continues_or_says_what_is_lost(
    settings: Path, tmp_path: Path, sites: dict[int, Site], harm: str
) -> None:
    """Each file of the folder: no traceback, no silent start from nothing, and what continues is right."""
    folder = tmp_path / "run"
    serve(ask(settings, folder), lambda max_bytes: AtOnce(sites, stop_after_five(folder)))
    before = [line["tasks"] for line in read_jsonl(folder, "trace")]
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert {"settings.json", "roster.json", "trace.jsonl", "records.jsonl", "journal/run"} <= set(names)
    assert len([name for name in names if name.endswith(".upload")]) >= 2
    answers = {}
    for name in names:
        place = tmp_path / "again"
        shutil.copytree(folder, place)
        HARMS[harm](place / name)
        outcome = serve(
            ask(settings, place, resume=(place / "settings.json").exists()),
            lambda max_bytes: AtOnce(sites),
        )
        answers[name] = outcome.error
        if outcome.error is None:
            assert outcome.version == 6, name
            after = [line["tasks"] for line in read_jsonl(place, "trace")]
            assert len(after) == 6, name
            assert after[: len(before)] == before, name  # nothing that counted is undone
        else:
            assert re.search(r"restore|backup|name another|damaged|move it away", outcome.error), name
            assert "Traceback" not in outcome.error
        shutil.rmtree(place)
    continued = {name for name, error in answers.items() if error is None}
    assert {name for name in names if Path(name).name in UNNEEDED} <= continued
    assert "checkpoint/state.safetensors" in continued  # from the one before it
    needed = {"settings.json", "roster.json", "trace.jsonl", "records.jsonl", "journal/run"}
    assert not needed & continued


RULES = """local_optimizer = "adam:0.9:0.99"
clip_grad_norm = 0.5
local_lr_schedule = "warmup:2,cosine:0.1"
server_lr_schedule = "served_task:slower"
parameters = { local_lr = 0.05 }
"""


def test_sites_follow_the_optimiser_and_the_schedules_of_the_server(
    settings: Path, home: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    """The deployed model is that of a plain loop over the trace with the method that the settings name."""
    code = TASK + "\ndef slower(version):\n    return 1 / (1 + version)\n"
    (home / "served_task.py").write_text(code)
    sys.modules.pop("served_task", None)
    settings.write_text(SETTINGS.replace("eval_every", f"{RULES}eval_every"))
    folder = tmp_path / "run"
    assert serve(ask(settings, folder), lambda max_bytes: AtOnce(sites)) == ServeOutcome(6)
    experiment = ServeConfig.read(settings).experiment
    algorithm = build_method(experiment, Setting(2, 3, 6), dict(experiment.parameters))
    roster = json.loads((folder / "roster.json").read_text())
    data = [load(roster[str(client)]["name"]) for client in range(2)]
    joined: Examples = trees.map(lambda *parts: torch.cat(parts), *data)
    population = Population(joined, [np.arange(12), np.arange(12, 24)], Steps(3, 4))
    module = seeded_module(lambda: nn.Linear(3, 2), experiment.seed)
    trace = list(read_jsonl(folder, "trace"))
    known = (Problem(module, cross_entropies), population, trace, parse_weights(experiment.weights))
    told = retell(algorithm, *known, seed=experiment.seed)
    saved = checkpoint.load(folder / "checkpoint" / "state.safetensors").tensors["state.0"]
    torch.testing.assert_close(saved, told, rtol=0, atol=1e-6)
    plain = build("fedbuff", Setting(2, 3, 6), {"local_lr": 0.05})
    other = retell(plain, *known, seed=experiment.seed)
    assert (saved - other).abs().max() > 1e-3


def test_a_deployment_ends_by_its_budget_and_goes_on_with_a_larger_one(
    settings: Path, tmp_path: Path, sites: dict[int, Site]
) -> None:
    folder = tmp_path / "run"
    settings.write_text(SETTINGS.replace("rounds", "max_client_updates = 5\nrounds"))
    outcome = serve(ask(settings, folder), lambda max_bytes: AtOnce(sites))
    assert outcome == ServeOutcome(3, "there were 6 client updates, and max_client_updates is 5")
    assert versions(folder) == [0, 2, 3]
    assert serve(ask(settings, folder, resume=True), lambda max_bytes: AtOnce(sites)) == outcome
    settings.write_text(SETTINGS.replace("rounds", 'stop_at = "loss:1e-9"\nrounds'))
    check_run_folder(folder, True, ServeConfig.read(settings))
    assert serve(ask(settings, folder, resume=True), lambda max_bytes: AtOnce(sites)) == ServeOutcome(6)
    assert versions(folder) == [0, 2, 4, 6]
    untested = SETTINGS.replace("served_task:task", "served_task:untested")
    settings.write_text(untested.replace("rounds", "patience = 2\nrounds"))
    refused = serve(ask(settings, tmp_path / "other"), lambda max_bytes: AtOnce(sites)).error
    assert refused is not None
    assert "patience looks at evaluations, and this run has no test data" in refused
