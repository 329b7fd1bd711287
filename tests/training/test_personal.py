"""Layers that stay at the client: trained there, kept there, and in nothing that is sent."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat import (
    Asynchronous,
    ClientData,
    Epochs,
    Examples,
    LearningTask,
    Problem,
    Sequential,
    Setting,
    Steps,
    Synchronous,
    Vectorised,
    build,
    evaluate_clients,
)
from offbeat.aggregate.private import Private
from offbeat.algorithms.rates import LocalAdam, LocalAdamW, LocallyOptimized, LocalMomentum, LocalNesterov
from offbeat.cli import main
from offbeat.core import Batch
from offbeat.data import sources
from offbeat.data.partition import split_alike
from offbeat.engines.local import TaskGradient
from offbeat.engines.process_pool import Workers
from offbeat.errors import InputError
from offbeat.schedule.dispatch import Phases
from offbeat.schedule.participation import Participation
from offbeat.training.checkpoint import Checkpoint
from oracles.local_rules import adam, momentum
from oracles.personal import fedsim
from oracles.replay import Run
from worlds import CLASSES, FEATURES, SEED, World, each, make_world, play, trace

RATES = {"local_lr": 0.2, "server_lr": 0.7}


def personal_world(
    work: Steps | Epochs = Steps(3, 4), names: tuple[str, ...] = ("bias",), lr: float = 0.5, **options: Any
) -> World:
    """The softmax world with a personal bias."""
    world = make_world(work=work, **options)
    module = world.problem.module(*world.problem.initial())
    return world._replace(problem=Problem(module, each, personal=names, personal_lr=lr))


def network() -> nn.Module:
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh())
    return nn.Sequential(body, nn.Linear(4, CLASSES)).double()


@pytest.mark.parametrize("work", [Steps(3, 4), Epochs(2, 4)], ids=["steps", "epochs"])
@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_shared_and_personal_weights_are_those_of_the_oracle(engine: Any, work: Steps | Epochs) -> None:
    world = personal_world(work)
    algorithm = build("fedbuff", Setting(3, 3, 8), RATES)
    shots = play(algorithm, engine(world.problem, world.population), Asynchronous(5))
    start = np.concatenate([world.problem.initial()[0].numpy(), world.problem.personal["bias"].numpy()])
    models, own = fedsim(
        Run(world.oracle, 8, start, trace(shots)), personal=CLASSES, personal_lr=0.5, **RATES
    )
    for shot, expected in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), expected, rtol=0, atol=1e-10)
    for client in range(8):
        np.testing.assert_allclose(
            shots[-1].personal(client)["bias"].numpy(), own[client], rtol=0, atol=1e-10
        )
    assert not np.allclose(own[0], own[1])


@pytest.mark.parametrize("work", [Steps(3, 4), Epochs(2, 4)], ids=["steps", "epochs"])
@pytest.mark.parametrize("engine", [Sequential, Vectorised])
@pytest.mark.parametrize("rule", ["momentum", "nesterov", "adam", "adamw"])
def test_a_local_optimiser_steps_both_parts_as_the_oracle_does(
    rule: str, engine: Any, work: Steps | Epochs
) -> None:
    ours, oracle = {
        "momentum": (LocalMomentum(0.8), momentum(0.8)),
        "nesterov": (LocalNesterov(0.8), momentum(0.8, nesterov=True)),
        "adam": (LocalAdam(0.8, 0.9, 1e-3), adam(0.8, 0.9, 1e-3)),
        "adamw": (LocalAdamW(0.1, 0.8, 0.9, 1e-3), adam(0.8, 0.9, 1e-3, decay=0.1)),
    }[rule]
    plain = personal_world(work)
    module = plain.problem.module(*plain.problem.initial())
    problem = Problem(module, each, personal=["bias"], personal_lr=0.05, personal_optimizer=ours)
    rates = {"local_lr": 0.02, "server_lr": 0.7}
    algorithm = LocallyOptimized(build("fedbuff", Setting(3, 3, 8), rates), ours)
    shots = play(algorithm, engine(problem, plain.population), Asynchronous(5))
    start = np.concatenate([problem.initial()[0].numpy(), problem.personal["bias"].numpy()])
    models, own = fedsim(
        Run(plain.oracle, 8, start, trace(shots)),
        personal=CLASSES,
        personal_lr=0.05,
        optimizer=oracle,
        **rates,
    )
    for shot, expected in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), expected, rtol=0, atol=1e-10)
    for client in range(8):
        assert shots[-1].personal(client).keys() == {"bias"}
        np.testing.assert_allclose(
            shots[-1].personal(client)["bias"].numpy(), own[client], rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("name", ["cadence", "delta-sgd", "fafed", "fedcm", "fednova", "mime", "scaffold"])
def test_all_methods_train_personal_layers_alike_on_both_engines(name: str) -> None:
    world = personal_world(Epochs(1, 4), ("1",), 0.1, module=network())
    algorithm = build(name, Setting(3, 3, 4), {})
    dispatch = Phases(3) if name == "mime" else Synchronous(3)
    one, other = (
        play(algorithm, engine(world.problem, world.population), dispatch, rounds=4)
        for engine in (Sequential, Vectorised)
    )
    torch.testing.assert_close(one[-1].x, other[-1].x, rtol=0, atol=1e-10)
    moved = 0
    for client in range(8):
        mine, same = one[-1].personal(client), other[-1].personal(client)
        torch.testing.assert_close(mine, same, rtol=0, atol=1e-10)
        moved += not torch.equal(mine["1.weight"], world.problem.personal["1.weight"])
    assert moved == len({task.client for shot in one if shot.filled for task in shot.filled.tasks})


def test_personal_layers_with_a_rate_of_zero_are_frozen_layers() -> None:
    module = network()
    frozen = network()
    for parameter in frozen[1].parameters():
        parameter.requires_grad_(False)
    world = make_world(module=module)
    algorithm = build("fedbuff", Setting(3, 3, 8), RATES)
    still, personal = (
        play(algorithm, Sequential(problem, world.population), Asynchronous(5))[-1].x
        for problem in (
            Problem(frozen, each),
            Problem(module, each, personal=["1.*"], personal_lr=0.0),
        )
    )
    assert torch.equal(still, personal)


def test_a_minibatch_moves_a_personal_layer_once_however_many_gradients_are_taken() -> None:
    """MIME first passes over all examples, and then takes two gradients of each minibatch."""
    world = personal_world(Steps(1, 4), ("bias",), 0.5)
    algorithm = build("mime", Setting(3, 1, 2), {})
    shots = play(algorithm, Sequential(world.problem, world.population), Phases(3), rounds=2)
    assert shots[2].filled
    bias = world.problem.personal["bias"]
    for client, version, visit in shots[2].filled.tasks:
        x = shots[version].x.numpy()
        gradient = world.oracle.gradient(client, visit, 0, np.concatenate([x, bias.numpy()]))[-CLASSES:]
        np.testing.assert_allclose(
            shots[2].personal(client)["bias"].numpy(), bias.numpy() - 0.5 * gradient, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("functional", [False, True])
def test_a_personal_layer_moves_by_the_first_gradient_of_a_minibatch_with_decay(functional: bool) -> None:
    """The gradient of a linear model's squared error in its bias, by hand."""
    module = nn.Linear(2, 1).double()
    problem = Problem(
        module, lambda out, y: (out[:, 0] - y) ** 2, weight_decay=0.3, personal=("bias",), personal_lr=0.5
    )
    x, statistics = problem.initial()
    inputs, targets = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([3.0]).double()
    batch = Batch((inputs, targets))
    how = problem.differentiate if functional else problem.differentiate_by_autograd
    gradient = TaskGradient(problem, how, dict(problem.personal) | dict(statistics))
    gradient(x, batch)
    gradient(x + 100.0, batch)  # as variance reduction takes it, at another model
    bias = problem.personal["bias"]
    slope = 2 * (inputs @ x[:2] + bias - targets) + 0.3 * bias
    torch.testing.assert_close(gradient.statistics["bias"], bias - 0.5 * slope, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_workers_compute_the_same_personal_layers() -> None:
    world = personal_world()
    algorithm = build("fedbuff", Setting(3, 3, 8), RATES)
    one, other = (
        play(algorithm, engine, Asynchronous(5))[-1]
        for engine in (
            Sequential(world.problem, world.population),
            Workers(world.problem, world.population, workers=2),
        )
    )
    torch.testing.assert_close(one.x, other.x, rtol=0, atol=1e-12)
    for client in range(8):
        torch.testing.assert_close(one.personal(client), other.personal(client), rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_a_run_resumes_with_the_personal_layers_of_its_clients(engine: Any) -> None:
    world = personal_world()
    algorithm = build("fedbuff", Setting(3, 3, 8), RATES)
    saved: list[Checkpoint] = []
    options = {"dispatch": Asynchronous(5), "buffer": 3, "rounds": 8, "seed": SEED}
    for shot in offbeat.train(algorithm, engine(world.problem, world.population), **options):
        if shot.version == 4:
            saved.append(shot.checkpoint())
    again = list(
        offbeat.train(algorithm, engine(world.problem, world.population), resume=saved[0], **options)
    )
    assert torch.equal(again[-1].x, shot.x)
    for client in range(8):
        assert torch.equal(again[-1].personal(client)["bias"], shot.personal(client)["bias"])


def test_only_the_shared_layers_are_sent_and_counted() -> None:
    world = personal_world()
    algorithm = build("fedbuff", Setting(3, 3, 8), RATES)
    last = play(algorithm, Sequential(world.problem, world.population), Asynchronous(5))[-1]
    shared = FEATURES * CLASSES
    assert world.problem.size == len(last.x) == shared
    assert last.sent.up == 24 * shared
    assert last.sent.down == last.counts.started * shared


def test_under_privacy_only_the_shared_layers_are_clipped_and_get_noise() -> None:
    """However far personal layers move, the private mean has the size of its bound and noise."""
    world = personal_world(lr=50.0)
    algorithm = build("fedbuff", Setting(3, 3, 1), RATES)
    aggregate = Private.of(algorithm, 0.01, 0.5, 1e-5, participation=Participation(8, 1), noise_seed=1)
    engine = Sequential(world.problem, world.population)
    last = play(algorithm, engine, Synchronous(3), rounds=1, aggregate=aggregate)[-1]
    noise = 0.01 * 0.5 / 3 * (FEATURES * CLASSES) ** 0.5
    assert (last.x - world.problem.initial()[0]).norm() < 0.7 * (0.01 + 2 * noise)
    assert last.filled
    for task in last.filled.tasks:
        moved = last.personal(task.client)["bias"] - world.problem.personal["bias"]
        assert moved.norm() > 1


def test_personal_normalisation_keeps_its_running_statistics_at_the_client() -> None:
    module = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)).double()
    world = make_world(module=module)
    problem = Problem(module, each, personal=["0"], personal_lr=0.1)
    assert not problem.tracks_statistics
    assert problem.initial()[1] == {}
    shots = play(
        build("fedbuff", Setting(3, 3, 8), RATES), Vectorised(problem, world.population), Asynchronous(5)
    )
    seen = {task.client for shot in shots[1:] if shot.filled for task in shot.filled.tasks}
    means = [shots[-1].personal(client)["0.running_mean"] for client in sorted(seen)]
    assert not torch.allclose(means[0], means[1])
    assert shots[-1].statistics == {}


def client_data(clients: int = 6) -> tuple[ClientData, ClientData]:
    """Clients whose labels are permuted, each in its own way: no common model fits them."""
    rng = np.random.default_rng(3)
    data = {}
    for client in range(clients):
        inputs = rng.normal(size=(40, 4)).astype(np.float32)
        targets = (inputs[:, 0] > 0).astype(np.int64)
        data[f"site-{client}"] = (inputs, targets if client % 2 else 1 - targets)
    return sources.client_data(data).split(0.25)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(inputs)))


def test_a_task_with_personal_layers_is_evaluated_by_client(tmp_path: Path) -> None:
    train, test = client_data()
    task = LearningTask(module=Net, data=train, test=test, personal=["head"])
    settings = {"rounds": 40, "local_steps": 10, "parameters": {"local_lr": 0.3, "server_lr": 1.0}}
    plain = offbeat.run(replace(task, personal=()), "fedbuff", out=tmp_path / "plain", **settings)
    own = offbeat.run(task, "fedbuff", out=tmp_path / "own", **settings)
    assert plain.records[-1]["accuracy_mean"] < 0.75
    assert own.records[-1]["accuracy_mean"] > 0.9
    assert own.experiment.personal == "head"
    held = json.loads((tmp_path / "own" / "settings.json").read_text())
    assert held["resolved"]["personal_size"] == 10
    assert held["resolved"]["model_size"] == 20
    again = offbeat.run(task, "fedbuff", out=tmp_path / "own", resume=True, rounds=41)
    assert again.version == 41
    module = own.module()
    assert isinstance(module, Net)
    mine = own.module(client="site-0")
    assert torch.equal(mine.body.weight, module.body.weight)
    with pytest.raises(InputError, match="unknown client 'site-9'"):
        own.module(client="site-9")
    assert not torch.equal(mine.head.weight, module.head.weight)
    one = test.examples("site-0")
    right = (mine(one.inputs).argmax(-1) == one.targets).float().mean()
    assert right > 0.85


def test_the_module_of_a_client_is_found_beside_what_its_method_keeps(tmp_path: Path) -> None:
    train, test = client_data()
    task = LearningTask(module=Net, data=train, test=test, personal=["head"])
    result = offbeat.run(task, "scaffold", out=tmp_path / "run", rounds=6, compress="topk:0.5", local_steps=5)
    heads = [result.module(client=name).head.weight for name in test.names or ()]
    assert sum(not torch.equal(head, result.module().head.weight) for head in heads) >= 3


def test_clients_that_never_trained_are_evaluated_with_the_initial_layers() -> None:
    torch.manual_seed(0)
    problem = Problem(Net(), each, personal=["head"], personal_lr=0.1)
    _, test = client_data(2)
    x = problem.initial()[0]
    own = {name: torch.zeros_like(value) for name, value in problem.personal.items()}
    found = evaluate_clients(problem, x, test, personal=lambda name: own if name == "site-0" else {})
    plain = evaluate_clients(problem, x, test)
    assert found.clients["loss"]["site-0"] == pytest.approx(np.log(2))
    assert found.clients["loss"]["site-1"] == plain.clients["loss"]["site-1"]


def test_a_common_test_set_is_divided_as_the_training_labels_are() -> None:
    labels = np.array([0] * 30 + [1] * 30)
    parts = [np.arange(0, 30), np.arange(30, 50), np.arange(50, 60)]
    test = np.array([0, 1] * 30)
    owned = split_alike(labels, parts, test)
    assert sorted(np.concatenate(owned)) == list(range(60))
    assert [np.bincount(test[own], minlength=2).tolist() for own in owned] == [[30, 0], [0, 20], [0, 10]]


def test_the_command_line_keeps_layers_at_clients_and_names_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "--clients",
        "10",
        "--concurrency",
        "5",
        "--buffer",
        "5",
        "--rounds",
        "2",
        "--local-steps",
        "1",
        "--partition",
        "dirichlet:0.1",
    ]
    assert main(["run", "fedbuff", *small, "--personal", "3", "--out", str(tmp_path / "run")]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert "accuracy_mean" in records[-1]
    capsys.readouterr()
    for option, sentence in {
        "haed": "the model has no layer 'haed' that could be personal: its layers are",
        "*": "every layer is personal, so nothing would be shared",
        ",": "--personal names no layer",
    }.items():
        assert main(["run", "fedbuff", *small, "--personal", option, "--out", str(tmp_path / "no")]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
        assert not (tmp_path / "no").exists()
    assert main(["run", "fedbuff", *small, "--personal-lr", "1", "--out", str(tmp_path / "no")]) == 2
    assert "--personal-lr is for personal layers" in capsys.readouterr().err


def test_pooled_test_data_of_clients_are_refused_with_personal_layers(tmp_path: Path) -> None:
    train, _ = client_data()
    common = Examples(torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64))
    task = LearningTask(module=Net, data=train, test=common, personal="head")
    with pytest.raises(InputError, match="evaluated client by client"):
        offbeat.run(task, "fedbuff", out=tmp_path / "run", rounds=1)


def test_personal_layers_of_a_standardised_task_are_those_of_scaled_data(tmp_path: Path) -> None:
    """With a local optimiser, too: the scaling comes first, and both are in the module of a client."""
    train, test = client_data()
    names = train.names
    assert names
    pooled = np.concatenate([np.asarray(train.examples(name).inputs) for name in names])
    mean, deviation = pooled.mean(0), pooled.std(0)

    def scaled(data: ClientData) -> ClientData:
        return ClientData.from_dict(
            {
                name: ((np.asarray(part.inputs) - mean) / deviation, np.asarray(part.targets))
                for name, part in ((name, data.examples(name)) for name in names)
            }
        )

    settings: dict[str, Any] = {"rounds": 12, "local_steps": 5, "local_optimizer": "adam:0.9:0.99:0.01"}
    settings |= {"parameters": {"local_lr": 0.02, "server_lr": 1.0}, "personal_lr": 0.05}
    task = LearningTask(module=Net, data=train, test=test, personal=["head"])
    ours = offbeat.run(task, "fedbuff", standardise=True, out=tmp_path / "ours", **settings)
    by_hand = replace(task, data=scaled(train), test=scaled(test))
    theirs = offbeat.run(by_hand, "fedbuff", out=tmp_path / "theirs", **settings)
    assert ours.records[-1]["accuracy_mean"] == pytest.approx(theirs.records[-1]["accuracy_mean"], abs=0.02)
    assert ours.records[-1]["loss"] == pytest.approx(theirs.records[-1]["loss"], rel=1e-3)
    plain = offbeat.run(
        task, "fedbuff", standardise=True, out=tmp_path / "sgd", **settings | {"local_optimizer": "sgd"}
    )
    assert plain.records[-1]["loss"] != pytest.approx(theirs.records[-1]["loss"], rel=1e-3)
    one = test.examples("site-0").inputs
    mine = ours.module(client="site-0")
    torch.testing.assert_close(
        mine(one), theirs.module(client="site-0")(scaled(test).examples("site-0").inputs), rtol=0, atol=1e-3
    )
    assert not torch.allclose(mine(one), ours.module()(one), atol=1e-2)
