"""A plan made real at the server: what is put together, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat import Examples, LearningTask
from offbeat.aggregate.mean import Mean
from offbeat.aggregate.private import Private
from offbeat.aggregate.secure import Secure
from offbeat.data.population import Steps
from offbeat.deploy.config import ServeConfig, frozen_weights_digest
from offbeat.deploy.server.setup import pool_site_data, set_up
from offbeat.deploy.site import site
from offbeat.errors import InputError
from offbeat.training.task import seeded_module

PRIVATE = {"clip": 1.0, "noise": 2.0, "delta": 1e-5, "max_participations": 3}


def plain() -> nn.Module:
    return nn.Linear(3, 2)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def with_body() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def held_out() -> Examples:
    return Examples(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64))


def nothing() -> Examples:
    return Examples(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))


def task(**parts: Any) -> LearningTask:
    return LearningTask(**{"module": plain, "data": lambda name: held_out()} | parts)


TASKS = {
    "plain": lambda: task(),
    "normed": lambda: task(module=normed),
    "with_body": lambda: task(module=with_body),
    "no_module": lambda: task(module=held_out),
    "squares": lambda: task(loss=squares),
    "with_test": lambda: task(test=held_out),
    "empty_test": lambda: task(test=nothing),
    "untestable": lambda: task(test=lambda: 1 / 0),
}
globals().update({f"{name}_task": made for name, made in TASKS.items()})  # each can be imported by its name


def plan(task: str = "plain", privacy: dict[str, Any] | None = None, **training: Any) -> ServeConfig:
    given: dict[str, Any] = {
        "task": {"function": f"{__name__}:{task}_task"},
        "training": {"algorithm": "fedbuff", "clients": 6, "buffer": 3, "rounds": 5} | training,
    }
    return ServeConfig.of(given | ({"privacy": privacy} if privacy else {}), Path(__file__).parent.parent)


def test_rates_follow_from_the_plans_own_numbers() -> None:
    short, long = (set_up(plan(algorithm="adamasfl", rounds=rounds)).algorithm for rounds in (5, 500))
    assert short != long


def test_the_model_begins_as_the_seed_says_and_leaves_other_draws_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (set_up(plan(seed=seed)).problem.initial()[0] for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sites_are_told_which_weights_are_not_trained() -> None:
    assert "frozen" not in set_up(plan()).site_plan
    told = site.read_plan(set_up(plan("with_body", seed=4)).site_plan).frozen
    assert (
        told
        == frozen_weights_digest(seeded_module(with_body, 4))
        != frozen_weights_digest(seeded_module(with_body, 5))
    )


def test_a_loss_is_the_cross_entropy_unless_one_is_named() -> None:
    outputs, targets = torch.tensor([[0.0, 0.0]]), torch.tensor([1])
    assert set_up(plan()).problem.loss(outputs, targets).item() == pytest.approx(math.log(2))
    assert set_up(plan("squares")).problem.loss is squares


def test_test_data_are_loaded_where_there_are_any() -> None:
    assert set_up(plan()).test is None
    stage = set_up(plan("with_test"))
    assert stage.test is not None
    assert stage.test.total == 5


def test_noise_of_an_earlier_start_is_taken_as_it_is() -> None:
    budget = PRIVATE | {"epsilon": 8.0, "accountant": "rdp"}
    del budget["noise"]
    first = set_up(plan(privacy=budget))
    again = set_up(plan(privacy=budget), first.noise)
    assert first.noise is not None
    assert first.noise > 0
    assert repr(again.aggregate) == repr(first.aggregate)
    assert set_up(plan()).noise is None


@pytest.mark.parametrize("privacy", [None, PRIVATE])
def test_sums_in_secret_go_with_and_without_noise(privacy: dict[str, Any] | None) -> None:
    aggregate = set_up(plan(privacy=privacy), summation=Secure(2)).aggregate
    assert isinstance(aggregate, Private if privacy else Mean)
    assert aggregate.summation == Secure(2)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (plan(algorithm="weight-prediction"), "which is not known before it arrives"),
        (plan("normed", PRIVATE), "keeps running statistics"),
        (plan("no_module"), "the model is a Examples: return a torch.nn.Module."),
        (plan("absent"), "has no 'absent_task'"),
        (plan("empty_test"), "no rows"),
        (plan("untestable"), "the test data could not be loaded: ZeroDivisionError"),
        (plan(device="quantum"), "unknown device 'quantum'"),
        (plan(precision="tf32"), "a CPU does not round products to tf32"),
        (plan(concurrency=9), "concurrency"),
        (plan(privacy=PRIVATE | {"clip": "nothing=1"}), "nothing"),
    ],
)
def test_what_cannot_be_is_one_sentence(made: ServeConfig, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        set_up(made)
    assert sentence in str(caught.value)
    assert "--" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_clients_whose_site_never_joined_have_no_examples_in_a_replay() -> None:
    def load(name: str) -> Examples:
        return Examples(torch.full((3, 1), float(name)), torch.zeros(3))

    population = pool_site_data(load, ["1", None, "2", None], Steps(1, 1))
    assert [len(population.parts[client]) for client in range(4)] == [3, 0, 3, 0]
    assert population.data.gather(population.parts[2]).inputs.tolist() == [[2.0]] * 3
