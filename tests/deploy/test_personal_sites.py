"""Personal layers of sites: nothing of them is in what a site sends or in what the server keeps."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deploy_world import Deployment, Letter, ramdisk
from offbeat import ClientData, Examples, LearningTask, Problem, Sequential, evaluate, trees
from offbeat.core import Task
from offbeat.deploy.protocol.messages import TaskMessage, encode_message, specs_of
from offbeat.deploy.protocol.transport import Reply
from offbeat.deploy.site.site import Site
from offbeat.training import checkpoint
from offbeat.training.replay import replay
from worlds import CLASSES, FEATURES, SEED, each, make_world

SENTINEL = 3.14159e-7
PERSONAL_LR = 0.1


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


@dataclass
class PersonalDeployment(Deployment):
    """The last layer of the model is personal, or, to see that the search finds something, shared."""

    name: str = "fedasync"  # its clients upload models, not differences
    buffer: int = 1
    rounds: int = 12
    personal: tuple[str, ...] = ("2",)
    personal_lr: float = PERSONAL_LR

    def __post_init__(self) -> None:
        super().__post_init__()
        self.world = make_world(self.clients, module=network(0))
        problem = Problem(network(0), each, personal=self.personal, personal_lr=self.personal_lr)
        self.world = self.world._replace(problem=problem)
        self.sent: list[bytes] = []
        self.network.meddle = self.listen

    def listen(self, letter: Letter, reply: Reply) -> list[Reply]:
        self.sent += [reply.header.encode(), reply.payload]
        return [reply]

    def site(self, client: int) -> Site:
        world = self.world

        def load(name: str) -> Examples:
            mine = world.population.parts[int(name)]
            return Examples(*trees.map(lambda leaf: leaf[mine], tuple(world.population.data)))

        module = network(0)
        with torch.no_grad():
            module[2].weight[0, 0] = SENTINEL
        return Site(str(client), self.place / f"site-{client}", load, lambda: module, each)

    @property
    def plan(self) -> dict[str, Any]:
        if not self.personal:
            return super().plan
        return super().plan | {"personal": list(self.personal), "personal_lr": self.personal_lr}

    def own_layers(self) -> dict[int, list[torch.Tensor]]:
        """What each site has on its disk of the run."""
        found = {}
        for client in range(self.clients):
            files = sorted((self.place / f"site-{client}" / "memory").rglob("*.safetensors"))
            found[client] = [leaf for file in files for leaf in checkpoint.load(file).tensors.values()]
        return found

    def everything_at_the_server(self) -> list[bytes]:
        files = [path.read_bytes() for path in self.folder.rglob("*") if path.is_file()]
        return self.sent + files


@pytest.fixture
def place() -> Iterator[Path]:
    with ramdisk() as folder:
        yield folder


def test_no_personal_value_is_in_any_upload_or_file_of_the_server(place: Path) -> None:
    run = PersonalDeployment(place, personal_lr=0.0)  # so that the sentinel stays as it is
    with run.joined():
        run.serve()
    needle = struct.pack("<d", SENTINEL)
    kept = run.own_layers()
    assert sum(bool(leaves) for leaves in kept.values()) >= 3
    assert all(any(SENTINEL in leaf for leaf in leaves) for leaves in kept.values() if leaves)
    pieces = run.everything_at_the_server()
    assert len(pieces) > 30
    assert not any(needle in piece for piece in pieces)


def test_no_trained_personal_value_is_in_any_upload_or_file_of_the_server(place: Path) -> None:
    run = PersonalDeployment(place)
    with run.joined():
        run.serve()
    pieces = run.everything_at_the_server()
    looked = 0
    for leaves in run.own_layers().values():
        for leaf in leaves:
            for value in leaf.reshape(-1).tolist():
                needle = struct.pack("<d", value)
                looked += 1
                assert not any(needle in piece for piece in pieces)
    assert looked > 3 * (4 * CLASSES + CLASSES)


def test_the_search_finds_the_values_of_layers_that_are_shared(place: Path) -> None:
    run = PersonalDeployment(place, personal=())
    with run.joined():
        run.serve()
    last = run.model()[-1].item()  # the last bias, which personal layers would have
    assert any(struct.pack("<d", last) in piece for piece in run.everything_at_the_server())


def test_a_deployment_with_personal_layers_is_the_simulation_of_its_trace(place: Path) -> None:
    run = PersonalDeployment(place, name="fedbuff", buffer=3, rounds=6)
    run.site = lambda client: Deployment.site(run, client)  # type: ignore[method-assign]
    with run.joined():
        run.serve()
    engine = Sequential(run.world.problem, run.population())
    shots = list(
        replay(run.algorithm, engine, run.trace(), dispatch=run.dispatch, buffer=3, rounds=6, seed=SEED)
    )
    torch.testing.assert_close(run.model(), shots[-1].x, rtol=0, atol=1e-12)
    roster = json.loads((run.folder / "roster.json").read_text())
    trained = {task[0] for line in run.trace() for task in line["tasks"]}
    own = run.own_layers()
    for client in trained:
        mine = shots[-1].personal(client)["2.weight"]
        kept = [leaf for leaf in own[int(roster[str(client)]["name"])] if leaf.shape == mine.shape]
        assert any(torch.allclose(leaf, mine, rtol=0, atol=1e-12) for leaf in kept)


def test_a_site_refuses_a_server_that_asks_for_its_personal_layers(place: Path) -> None:
    run = PersonalDeployment(place, personal=())
    examples = run.world.population.data
    assert isinstance(examples, Examples)
    folder = place / "site-0"
    site = Site("0", folder, lambda name: examples, lambda: network(0), each, personal=["2"])
    try:
        header = encode_message(
            TaskMessage("run-1", Task(0, 0, 0), False, -1, run.plan, 20.0, specs_of(()), None)
        )
        answer, payload = site.answer("task", header, b"")
        assert payload == b""
        assert "task of this site keeps 2 here, and the server asks for none" in answer
    finally:
        site.close()


def test_a_site_evaluates_its_own_model_and_tells_nobody(place: Path) -> None:
    run = PersonalDeployment(place, name="fedbuff", buffer=3, rounds=6)
    data = run.world.population.data
    assert isinstance(data, Examples)

    def site(client: int) -> Site:
        plain = Deployment.site(run, client)
        plain._test = data  # as `offbeat join` gives it
        return plain

    run.site = site  # type: ignore[method-assign]
    with run.joined():
        run.serve()
    engine = Sequential(run.world.problem, run.population())
    shots = list(
        replay(run.algorithm, engine, run.trace(), dispatch=run.dispatch, buffer=3, rounds=6, seed=SEED)
    )
    pieces, lines = run.everything_at_the_server(), 0
    for client in range(run.clients):
        path = place / f"site-{client}" / "evaluations.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        lines += len(found)
        for each_line in found:
            assert not any(str(each_line["loss"]).encode() in piece for piece in pieces)
            assert not any(struct.pack("<d", each_line["loss"]) in piece for piece in pieces)
        if found:  # its first model has the initial layers
            truth = evaluate(run.world.problem, shots[found[0]["version"]].x, data)
            assert found[0]["loss"] == pytest.approx(truth["loss"], abs=1e-12)
            assert found[0]["examples"] == data.total
        if len(found) > 1:
            plain = evaluate(run.world.problem, shots[found[-1]["version"]].x, data)
            assert found[-1]["loss"] != pytest.approx(plain["loss"], abs=1e-9)  # its own layers differ
    assert lines >= 18


def test_a_site_finds_test_data_under_its_own_name_alone() -> None:
    def part(seed: int) -> Examples:
        inputs = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(seed)).double()
        return Examples(inputs, torch.zeros(5, dtype=torch.int64))

    data = ClientData.from_dict({"a": part(0), "b": part(1)})
    own = LearningTask(
        module=network(0), data=data, test=ClientData.from_dict({"a": part(2)}), personal=["2"]
    )
    mine = own.site_test("a")
    assert mine is not None
    assert torch.equal(mine.inputs, part(2).inputs)
    assert own.site_test("b") is None
    assert replace(own, personal=()).site_test("a") is None
    assert replace(own, test=part(3)).site_test("a") is None
    assert replace(own, test=None).site_test("a") is None
