"""A site gives what the sequential engine gives, to the bit, and says in one sentence what is wrong."""

import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from msgspec import structs
from torch import nn

from offbeat import Asynchronous, Epochs, Examples, Problem, Sequential, Setting, Synchronous, build, trees
from offbeat.aggregate.secure import read_terms
from offbeat.aggregate.uploads import clients_read_staleness
from offbeat.core import AnyAlgorithm, Task, Vector
from offbeat.data.client_store import Anywhere
from offbeat.deploy.config import frozen_weights_digest
from offbeat.deploy.keys import fingerprint, signed_statement, verify_signature
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.messages import (
    HelloReply,
    TaskMessage,
    UploadMessage,
    byte_size,
    decode_message,
    pack,
    specs_of,
    unpack,
)
from offbeat.deploy.server.validation import plain_validator, validate_upload
from offbeat.deploy.site.site import Site
from offbeat.engines.local import TaskResults, TaskStart
from offbeat.engines.simulation import Simulation
from offbeat.errors import InputError
from offbeat.nn.problem import Statistics
from offbeat.schedule.availability import Always, Availability, Dropout
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import Tiers
from offbeat.schedule.rng import Rng
from offbeat.training.task import seeded_module
from worlds import CLASSES, FEATURES, SEED, World, each, make_world, play

SETTING = Setting(3, 3, 8)
CLIENTS = 8


def plan_of(name: str, parameters: dict[str, Any], work: list[Any] | None = None) -> dict[str, Any]:
    return {
        "algorithm": name,
        "parameters": parameters,
        "setting": list(SETTING),
        "work": work or ["steps", 3, 4],
        "weight_decay": 0.0,
        "precision": "auto",
        "seed": SEED,
        "clients": CLIENTS,
    }


def own_examples(world: World, client: int) -> Examples:
    return Examples(
        *trees.map(lambda leaf: leaf[world.population.parts[client]], tuple(world.population.data))
    )


def model_of(world: World) -> nn.Module:
    return world.problem.module(*world.problem.initial())


def make_sites(world: World, folder: Path) -> list[Site]:
    def load(name: str) -> Examples:
        return own_examples(world, int(name))

    return [
        Site(str(client), folder / str(client), load, lambda: model_of(world), each)
        for client in range(len(world.population))
    ]


class BySites:
    """Work that goes to sites and back as notes and bytes; what clients keep stays with them."""

    def __init__(self, sites: list[Site], main: AnyAlgorithm, plan: dict[str, Any], x: Vector) -> None:
        self._sites = sites
        self._main = main
        self._plan = plan
        self._x = x
        self._committed = [-1] * len(sites)
        self.memories: list[str] = []

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        results = [self._one(algorithm, task, start) for task, start in zip(tasks, starts, strict=True)]
        stacked: TaskResults = trees.stack(results)
        return stacked

    def close(self) -> None:
        pass

    def _one(self, algorithm: AnyAlgorithm, task: Task, start: TaskStart) -> TaskResults:
        down = (start.message, start.statistics)
        note = TaskMessage(
            "run-1",
            task,
            algorithm is not self._main,
            self._committed[task.client],
            self._plan,
            60.0,
            specs_of(down),
            None,
        )
        text, payload = self._sites[task.client].answer("task", messages.encode_message(note), pack(down))
        intake = plain_validator(algorithm, self._x, start.statistics)
        _, leaves = validate_upload(text, payload, task, "run-1", intake, 10**6)
        self._committed[task.client] = task.visit
        self.memories.append(decode_message(text, UploadMessage).memory)
        uploads, statistics = trees.unflatten(intake.structure, leaves)
        return TaskResults(uploads, start.memory, statistics)


@dataclass(frozen=True)
class AtSites:
    """The sequential engine, but that sites do the work."""

    problem: Problem
    work: BySites
    clients: int
    availability: Availability = Always()

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Rng) -> Simulation:
        clock = Clock(Tiers("mild").bind(source, self.clients), source, Dropout())
        return Simulation(algorithm, self.problem, clock, self.work, seed, Anywhere(), self.clients)


METHODS: dict[str, dict[str, Any]] = {
    "adamasfl": {},
    "ca2fl": {},
    "fadas": {},
    "fedbuff": {},
    "ma-fedavgm": {},
    "masfl": {},
    "padamfed-vr": {"local_lr": 0.05},
    "scaffold": {},
}


@pytest.mark.parametrize("name", [*METHODS])
def test_sites_give_the_sequential_engines_model_to_the_bit(name: str, tmp_path: Path) -> None:
    world = make_world(CLIENTS)
    algorithm = build(name, SETTING, METHODS[name])
    assert not clients_read_staleness(algorithm)
    sites = make_sites(world, tmp_path)
    work = BySites(sites, algorithm, plan_of(name, METHODS[name]), world.problem.initial()[0])
    dispatch = Asynchronous(4)
    shots = play(algorithm, AtSites(world.problem, work, CLIENTS), dispatch)
    wanted = play(algorithm, Sequential(world.problem, world.population), dispatch)
    assert len(shots) == len(wanted) == 9
    for shot, other in zip(shots, wanted, strict=True):
        assert torch.equal(shot.x, other.x)
    assert not torch.equal(shots[-1].x, shots[0].x)
    keeps = bool(trees.leaves(algorithm.memory(torch.zeros(1))))
    assert set(work.memories) == ({"new", "kept"} if keeps else {"none"})
    assert any((tmp_path / str(client) / "memory").exists() for client in range(CLIENTS)) == keeps
    for site in sites:
        site.close()


def test_epochs_and_synchronous_rounds_agree_too(tmp_path: Path) -> None:
    world = make_world(CLIENTS, Epochs(2, 4))
    algorithm = build("scaffold", SETTING, {})
    sites = make_sites(world, tmp_path)
    work = BySites(sites, algorithm, plan_of("scaffold", {}, ["epochs", 2, 4]), world.problem.initial()[0])
    shots = play(algorithm, AtSites(world.problem, work, CLIENTS), Synchronous(3), rounds=4)
    wanted = play(algorithm, Sequential(world.problem, world.population), Synchronous(3), rounds=4)
    assert torch.equal(shots[-1].x, wanted[-1].x)


def frozen_body() -> nn.Module:
    body = nn.Linear(FEATURES, 5).requires_grad_(False)
    return nn.Sequential(body, nn.Tanh(), nn.Linear(5, CLASSES)).double()


def test_a_random_body_that_is_not_trained_is_the_same_everywhere_and_stays_at_home(tmp_path: Path) -> None:
    world = make_world(CLIENTS)
    made = seeded_module(frozen_body, SEED)
    world = world._replace(problem=Problem(made, each))
    plan = plan_of("fedbuff", {}) | {"frozen": frozen_weights_digest(made)}
    sites = [
        Site(str(n), tmp_path / str(n), lambda name: own_examples(world, int(name)), frozen_body, each)
        for n in range(CLIENTS)
    ]
    algorithm = build("fedbuff", SETTING, {})
    x = world.problem.initial()[0]
    assert len(x) == 6 * CLASSES
    deployed = AtSites(world.problem, BySites(sites, algorithm, plan, x), CLIENTS)
    shots = play(algorithm, deployed, Asynchronous(4), rounds=3)
    wanted = play(algorithm, Sequential(world.problem, world.population), Asynchronous(4), rounds=3)
    assert torch.equal(shots[-1].x, wanted[-1].x)
    for site in sites:
        site.close()


@pytest.mark.parametrize("seed", [SEED + 1, None])
def test_a_body_that_is_not_the_servers_is_refused(tmp_path: Path, seed: int | None) -> None:
    asking = Asking(tmp_path, module=frozen_body)
    if seed is not None:
        asking.plan["frozen"] = frozen_weights_digest(seeded_module(frozen_body, seed))
    assert "the frozen weights differ from the server's" in asking.error()


def test_weights_that_are_not_trained_are_told_apart() -> None:
    one, other = seeded_module(frozen_body, 1), seeded_module(frozen_body, 2)
    assert (
        frozen_weights_digest(one)
        == frozen_weights_digest(seeded_module(frozen_body, 1))
        != frozen_weights_digest(other)
    )
    assert frozen_weights_digest(one.to(torch.bfloat16)) not in (None, frozen_weights_digest(other))
    assert frozen_weights_digest(nn.Linear(2, 2)) is None


class Asking:
    """One site as a server would ask it."""

    def __init__(self, folder: Path, method: str = "scaffold", **more: Any) -> None:
        self.world = make_world(CLIENTS)
        self.plan = plan_of(method, {})
        self.algorithm = build(method, SETTING, {})
        self.module = more.pop("module", lambda: model_of(self.world))
        self.load = more.pop("load", lambda name: own_examples(self.world, 2))
        self.losses = more.pop("losses", each)
        self.site = Site("hospital-a", folder, self.load, self.module, self.losses, **more)

    def note(self, **more: Any) -> TaskMessage:
        x, statistics = self.world.problem.initial()
        down = (self.algorithm.broadcast(self.algorithm.init(x), 0), statistics)
        note = TaskMessage("run-1", Task(2, 0, 0), False, -1, self.plan, 60.0, specs_of(down), None)
        return structs.replace(note, **more)

    def payload(self) -> bytes:
        x, statistics = self.world.problem.initial()
        return pack((self.algorithm.broadcast(self.algorithm.init(x), 0), statistics))

    def ask(self, payload: bytes | None = None, **more: Any) -> tuple[UploadMessage, bytes]:
        text = messages.encode_message(self.note(**more))
        answer, data = self.site.answer("task", text, self.payload() if payload is None else payload)
        return decode_message(answer, UploadMessage), data

    def error(self, payload: bytes | None = None, **more: Any) -> str:
        upload, data = self.ask(payload, **more)
        assert data == b""
        assert upload.error is not None
        assert upload.form == ()
        return upload.error


def test_a_hello_tells_who_it_is_and_what_it_has(tmp_path: Path) -> None:
    asking = Asking(tmp_path)
    text, payload = asking.site.answer("hello", "", b"")
    hello = decode_message(text, HelloReply)
    assert payload == b""
    assert (hello.name, hello.error, hello.key) == ("hospital-a", None, None)
    assert hello.site == asking.site.site_id
    assert hello.examples == asking.world.population.size(2)
    assert hello.form == specs_of(asking.world.problem.initial())


def test_an_upload_says_what_it_is_of(tmp_path: Path) -> None:
    asking = Asking(tmp_path)
    upload, payload = asking.ask(task=Task(2, 5, 3))
    assert (upload.run, upload.task) == ("run-1", Task(2, 5, 3))
    assert upload.memory == "new"
    assert len(payload) == byte_size(upload.form)
    assert upload.seconds > 0


def test_a_repeated_task_gets_the_same_bytes(tmp_path: Path) -> None:
    asking = Asking(tmp_path)
    first, second = asking.ask(), asking.ask()
    assert first[1] == second[1]


def test_memory_takes_effect_when_the_server_says_so(tmp_path: Path) -> None:
    asking = Asking(tmp_path)
    asking.ask(task=Task(2, 0, 0))
    unused = asking.ask(task=Task(2, 0, 1), committed=-1)
    used = asking.ask(task=Task(2, 0, 1), committed=0)
    again = asking.ask(task=Task(2, 0, 1), committed=0)
    assert (unused[0].memory, used[0].memory) == ("new", "kept")
    assert unused[1] != used[1]
    assert used[1] == again[1]


def test_a_site_that_is_started_again_goes_on(tmp_path: Path) -> None:
    there = Asking(tmp_path / "a")
    wanted = [there.ask(task=Task(2, 0, visit), committed=visit - 1)[1] for visit in range(4)]
    for visit in range(4):
        asking = Asking(tmp_path / "b")
        assert asking.ask(task=Task(2, 0, visit), committed=visit - 1)[1] == wanted[visit]
        asking.site.close()


def test_runs_do_not_share_memory(tmp_path: Path) -> None:
    asking = Asking(tmp_path)
    asking.ask()
    assert asking.ask(run="run-2", task=Task(2, 0, 1), committed=0)[0].memory == "new"
    assert asking.ask(run="run-1", task=Task(2, 0, 1), committed=0)[0].memory == "kept"


def test_the_start_of_everybody_runs_the_methods_own(tmp_path: Path) -> None:
    asking = Asking(tmp_path, "adamasfl")
    warmup = asking.algorithm.warmup()
    assert warmup is not None
    plain, first = asking.ask(), asking.ask(start=True)
    intake = plain_validator(warmup, *asking.world.problem.initial())
    assert first[0].form == intake.form
    assert first[1] != plain[1]


def test_a_start_that_a_method_does_not_have_is_refused(tmp_path: Path) -> None:
    assert "full-participation start" in Asking(tmp_path, "fedbuff").error(start=True)


def test_another_model_at_the_server_is_named(tmp_path: Path) -> None:
    asking = Asking(tmp_path, "fedbuff")
    x = torch.zeros(1000, dtype=torch.float64)
    down = (asking.algorithm.broadcast(asking.algorithm.init(x), 0), {})
    size = asking.world.problem.size
    sentence = asking.error(pack(down), form=specs_of(down))
    assert f"the model here has {size} parameters, the server's 1000" in sentence


def test_another_type_of_numbers_at_the_server_is_named(tmp_path: Path) -> None:
    asking = Asking(tmp_path, "fedbuff")
    down = trees.map(lambda leaf: leaf.float(), asking.world.problem.initial())
    assert "float32, not 18 float64" in asking.error(pack(down), form=specs_of(down))


def test_a_payload_of_another_size_is_refused(tmp_path: Path) -> None:
    asking = Asking(tmp_path)
    assert "bytes" in asking.error(asking.payload()[:-1])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"algorithm": "fedbufff"}, "did you mean"),
        ({"algorithm": "os.system"}, "unknown algorithm"),
        ({"parameters": {"local_rl": 1}}, "local_lr"),
        ({"parameters": {"local_lr": "1"}}, "must be a number"),
        ({"work": ["hours", 1, 1]}, "work"),
        ({"work": ["steps", 0, 1]}, "work"),
        ({"work": None}, "work"),
        ({"setting": [1, 2]}, "setting"),
        ({"precision": "double"}, "precision"),
        ({"weight_decay": -1.0}, "weight decay"),
        ({"weight_decay": True}, "weight_decay"),
        ({"seed": 0.5}, "seed"),
        ({"clients": 2}, "client 2, of 2"),
        ({"newer": 1}, "same version"),
    ],
)
def test_a_plan_that_cannot_be_is_one_sentence(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    asking = Asking(tmp_path)
    sentence = asking.error(plan=asking.plan | change)
    assert word in sentence
    assert "\n" not in sentence
    assert asking.ask()[0].error is None  # and the next one is served


def test_a_plan_that_lacks_something_is_refused(tmp_path: Path) -> None:
    asking = Asking(tmp_path)
    for name in asking.plan:
        less = {key: value for key, value in asking.plan.items() if key != name}
        assert f"missing required field `{name}`" in asking.error(plan=less)


@pytest.mark.parametrize("text", ["", "{}", "nonsense", "[" * 10_000, '{"run": NaN}', "\ud800"])
def test_a_note_that_cannot_be_read_is_answered_all_the_same(text: str, tmp_path: Path) -> None:
    answer, payload = Asking(tmp_path).site.answer("task", text, b"\x00" * 9)
    assert decode_message(answer, UploadMessage).error
    assert payload == b""


def test_another_kind_of_request_is_answered_with_an_error(tmp_path: Path) -> None:
    answer, _ = Asking(tmp_path).site.answer("dance", "{}", b"")
    assert "hello, task and recall" in str(decode_message(answer, UploadMessage).error)


def test_what_a_users_code_says_stays_in_the_sites_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise KeyError("patient 17")

    asking = Asking(tmp_path, losses=losses)
    sentence = asking.error()
    assert "KeyError" in sentence
    assert "17" not in sentence
    assert "patient 17" in caplog.text


def test_an_update_that_diverged_is_not_sent_nor_kept(tmp_path: Path) -> None:
    asking = Asking(tmp_path, losses=lambda outputs, targets: each(outputs, targets) * torch.nan)
    assert "NaN" in asking.error()
    assert not (tmp_path / "memory").exists()


def test_damaged_memory_is_said_and_not_passed_over(tmp_path: Path) -> None:
    asking = Asking(tmp_path)
    asking.ask()
    (path,) = tmp_path.glob("memory/run-1/*.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    sentence = asking.error(task=Task(2, 0, 1), committed=0)
    assert "damaged" in sentence
    assert str(tmp_path) not in sentence


def test_memory_of_another_model_is_refused(tmp_path: Path) -> None:
    asking = Asking(tmp_path)
    asking.ask()
    asking.site.close()
    other = nn.Linear(FEATURES, CLASSES, bias=False).double()
    smaller = Asking(tmp_path, module=lambda: other)
    x, statistics = Problem(other, each).initial()
    down = (smaller.algorithm.broadcast(smaller.algorithm.init(x), 0), statistics)
    sentence = smaller.error(pack(down), form=specs_of(down), task=Task(2, 0, 1), committed=0)
    assert "another model" in sentence


def test_running_statistics_go_up_beside_the_upload(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)).double()
    asking = Asking(tmp_path, "fedbuff", module=lambda: module)
    x, statistics = Problem(module, each).initial()
    down = (asking.algorithm.broadcast(asking.algorithm.init(x), 0), statistics)
    upload, payload = asking.ask(pack(down), form=specs_of(down))
    leaves = unpack(payload, upload.form)
    assert len(leaves) == 1 + len(statistics)
    assert any(not torch.equal(a, b) for a, b in zip(leaves[1:], trees.leaves(statistics), strict=True))


def test_a_module_that_draws_is_refused_to_a_method_of_two_gradients(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.5)).double()
    assert "dropout" in Asking(tmp_path, "padamfed-vr", module=lambda: module).error()


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"load": lambda name: 1 / 0}, "ZeroDivisionError"),
        ({"load": lambda name: 3}, "not a pair"),
        ({"load": lambda name: (torch.zeros(0, 2), torch.zeros(0))}, "empty"),
        ({"load": lambda name: (torch.zeros(3, 2), torch.zeros(4))}, "disagree"),
        ({"module": lambda: 1 / 0}, "ZeroDivisionError"),
        ({"module": lambda: 3}, "torch.nn.Module"),
        ({"key": Path("nowhere")}, "key"),
        ({"helper_key": Path("nowhere")}, "key"),
    ],
)
def test_a_site_that_cannot_be_is_one_sentence_and_lets_go(
    more: dict[str, Any], word: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=word):
        Asking(tmp_path, **more)
    Asking(tmp_path).site.close()


@pytest.mark.parametrize("name", ["", "a" * 101, "two\nlines"])
def test_a_name_that_no_note_can_hold_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name"):
        Site(name, tmp_path, lambda name: Examples(torch.zeros(1), torch.zeros(1)), lambda: nn.Linear(1, 1))


def secure_facts(size: int, key: X25519PrivateKey, **more: Any) -> dict[str, Any]:
    """What a server says of its secure sums."""
    facts = {"run": "ab", "length": size, "most": 4, "minimum": 2, "bits": 16, "weight_bits": 0}
    facts |= {
        "weights": "constant",
        "stochastic": False,
        "bounds": None,
        "moving": [],
        "signed": False,
        "noise": None,
    }
    return facts | {"key": key.public_key().public_bytes_raw().hex()} | more


def pinned(path: Path, key: X25519PrivateKey) -> Path:
    """A file with the helper's public key, for a site to be given."""
    path.write_text(key.public_key().public_bytes_raw().hex() + "\n")
    return path


def test_a_secure_upload_leaves_as_a_share_and_a_sealed_seed(tmp_path: Path) -> None:
    plain = Asking(tmp_path / "plain", "fedbuff").ask()
    helper = X25519PrivateKey.generate()
    asking = Asking(
        tmp_path / "site", "fedbuff", helper_key=pinned(tmp_path / "helper.pub", helper), minimum=2
    )
    secure = secure_facts(asking.world.problem.size, helper)
    first, second = asking.ask(secure=secure), asking.ask(secure=secure)
    assert first[0].error is None
    assert [name for name, _ in first[0].form] == ["int32", "uint8", "uint8"]
    assert first[0].form[0][1] == (asking.world.problem.size,)
    assert len({plain[1], first[1], second[1]}) == 3  # each is hidden by draws of its own


def test_a_signed_upload_needs_the_sites_key_and_bears_its_signature(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    text = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "key").write_bytes(text)
    helper = X25519PrivateKey.generate()
    trust = {"helper_key": pinned(tmp_path / "helper.pub", helper), "minimum": 2}
    asking = Asking(tmp_path / "site", "fedbuff", key=tmp_path / "key", **trust)
    secure = secure_facts(asking.world.problem.size, helper, signed=True)
    upload, payload = asking.ask(secure=secure)
    assert upload.error is None
    _, sealed, signature = (leaf.numpy().tobytes() for leaf in unpack(payload, upload.form))
    assert verify_signature(
        key.public_key(), signed_statement(read_terms(secure), Task(2, 0, 0), sealed), signature
    )
    assert decode_message(asking.site.answer("hello", "", b"")[0], HelloReply).key == fingerprint(
        key.public_key()
    )
    asking.site.close()
    assert "--key" in Asking(tmp_path / "site", "fedbuff", **trust).error(secure=secure)


def test_a_site_that_trusts_one_helper_reports_to_no_other_and_not_in_plain_sight(tmp_path: Path) -> None:
    helper, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    asking = Asking(tmp_path / "site", helper_key=pinned(tmp_path / "helper.pub", helper), minimum=2)
    assert "secure aggregation only" in asking.error()
    size = 2 * asking.world.problem.size
    assert "another helper" in asking.error(secure=secure_facts(size, other))
    assert not (tmp_path / "site" / "memory").exists()  # nothing was computed
    assert asking.ask(secure=secure_facts(size, helper))[0].error is None


def test_a_site_with_a_minimum_sends_nothing_to_smaller_sums(tmp_path: Path) -> None:
    helper = X25519PrivateKey.generate()
    asking = Asking(tmp_path / "site", helper_key=pinned(tmp_path / "helper.pub", helper), minimum=6)
    facts = secure_facts(2 * asking.world.problem.size, helper, minimum=5, most=10)
    assert "secure aggregation only" in asking.error()
    assert "6 or more only" in asking.error(secure=facts)
    assert asking.ask(secure=facts | {"minimum": 6})[0].error is None


def test_a_site_that_was_promised_secure_sums_never_sends_plain_ones_again(tmp_path: Path) -> None:
    """Neither where the server drops the table, nor where the site is started without its options."""
    helper, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    key, folder = pinned(tmp_path / "helper.pub", helper), tmp_path / "site"
    first = Asking(folder, "fedbuff", helper_key=key, minimum=2)
    size = first.world.problem.size
    assert first.ask(secure=secure_facts(size, helper))[0].error is None
    assert "secure aggregation only" in first.error()
    first.site.close()
    again = Asking(folder, "fedbuff", minimum=2)
    assert "secure aggregation only" in again.error()
    assert "another helper" in again.error(secure=secure_facts(size, other))
    assert again.ask(secure=secure_facts(size, helper))[0].error is None
    again.site.close()
    with pytest.raises(InputError, match="another helper's key before"):
        Asking(folder, "fedbuff", helper_key=pinned(tmp_path / "other.pub", other))
    (folder / "helper.pub").write_text("nothing")
    with pytest.raises(InputError, match="is damaged"):
        Asking(folder, "fedbuff")


def test_a_site_without_the_helpers_key_takes_part_in_no_secure_sum(tmp_path: Path) -> None:
    asking = Asking(tmp_path / "site", "fedbuff")
    facts = secure_facts(asking.world.problem.size, X25519PrivateKey.generate(), minimum=5, most=10)
    assert "whose key this site was not given" in asking.error(secure=facts)
    assert asking.ask()[0].error is None


def test_running_statistics_never_leave_beside_a_secure_upload(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)).double()
    helper = X25519PrivateKey.generate()
    trust = {"helper_key": pinned(tmp_path / "helper.pub", helper), "minimum": 2}
    asking = Asking(tmp_path / "site", "fedbuff", module=lambda: module, **trust)
    x, statistics = Problem(module, each).initial()
    down = (asking.algorithm.broadcast(asking.algorithm.init(x), 0), statistics)
    secure = secure_facts(len(x), helper)
    assert "GroupNorm" in asking.error(pack(down), form=specs_of(down), secure=secure)


FORBIDDEN = (
    "pickle.find_class",
    "marshal.loads",
    "exec",
    "compile",
    "import",
    "subprocess.Popen",
    "os.system",
)
_EVENTS: list[tuple[str, str]] = []
_WATCHING = threading.Event()


def _watch(event: str, given: tuple[Any, ...]) -> None:
    if _WATCHING.is_set() and event in FORBIDDEN:
        _EVENTS.append((event, str(given[0])[:80]))


@pytest.fixture
def executed() -> Iterator[list[tuple[str, str]]]:
    """What was executed, imported, unpickled or started meanwhile; a hook of Python's stays for good."""
    if not hasattr(_watch, "added"):
        sys.addaudithook(_watch)
        _watch.added = True  # type: ignore[attr-defined]
    _EVENTS.clear()
    _WATCHING.set()
    yield _EVENTS
    _WATCHING.clear()


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_a_site_runs_only_its_own_code_whatever_the_server_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: list[tuple[str, str]]
) -> None:
    """A server could once have every site run any code: it was in the app that the SuperLink sent."""
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\ndef task(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    asking = Asking(tmp_path / "site", "fedbuff")
    wanted = asking.ask()[1]  # whatever a task needs is imported now
    executed.clear()
    pickled = pickle.dumps(Bomb(marker))
    executed.clear()  # of pickling
    plan = asking.plan
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    names = ("evil:task", "evil", "evil.task", "os.system", code)
    asked = [("task", messages.encode_message(asking.note()), pickled), ("app", code, pickled)]
    for name in names:
        changed = [plan | {"algorithm": name}, plan | {"task": name}, plan | {"work": [name, 3, 4]}]
        changed += [plan | {"precision": name}, plan | {"parameters": {"local_lr": name}}]
        asked += [
            ("task", messages.encode_message(asking.note(plan=each)), asking.payload()) for each in changed
        ]
        asked += [(name, name, pickled), ("hello", name, pickled), ("task", name, pickled)]
    for kind, header, payload in asked:
        answer, data = asking.site.answer(kind, header, payload)
        assert data == b""
        assert kind == "hello" or decode_message(answer, UploadMessage).error
    assert not marker.exists()
    assert "evil" not in sys.modules
    assert [each for each in executed if not each[1].startswith("<")] == []
    assert asking.ask()[1] == wanted
