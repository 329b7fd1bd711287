"""Arguments of the wrong kind in Python: one sentence each, and not an error from deep inside."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat.algorithms.rates import LocalAdam, LocallyOptimized

PROBLEM = offbeat.Problem(nn.Linear(3, 2), nn.functional.cross_entropy)
DATA = offbeat.Examples(torch.zeros(12, 3), torch.zeros(12, dtype=torch.int64))
PARTS = offbeat.Iid().split(DATA.targets.numpy(), clients=4)
CLIENTS = offbeat.Population(DATA, PARTS, offbeat.Steps(1, 2))
ENGINE = offbeat.Vectorised(PROBLEM, CLIENTS)
ARGUMENTS: dict[str, Any] = {
    "algorithm": offbeat.FedOpt(0.1, 1.0),
    "engine": ENGINE,
    "dispatch": offbeat.Asynchronous(3),
    "buffer": 2,
    "rounds": 2,
}


def train(**others: Any) -> Callable[[], Any]:
    return lambda: next(offbeat.train(**ARGUMENTS | others))


VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "dispatch, a name": (train(dispatch="async"), "the dispatch is 'async': give one such as offbeat.Asyn"),
    "dispatch, a class": (train(dispatch=offbeat.Asynchronous), "the dispatch is the class Asynchronous"),
    "method, a name": (train(algorithm="fedbuff"), "the algorithm is 'fedbuff': give an instance of"),
    "method, a class": (train(algorithm=offbeat.FedOpt), "the algorithm is the class FedOpt"),
    "engine": (train(engine=None), "the engine is None: give one such as offbeat.Vectorised"),
    "buffer, a text": (train(buffer="2"), "the buffer is '2': give a whole number."),
    "buffer, zero": (train(buffer=0), "the buffer is 0: give at least 1."),
    "rounds": (train(rounds=2.5), "the number of rounds is 2.5: give a whole number of at least 1."),
    "seed": (train(seed="x"), "the seed is 'x': give a whole number of at least 0."),
    "weights": (train(weights="polynomial"), "weights is 'polynomial': give weights such as"),
    "staleness": (train(max_staleness="3"), "the largest staleness is '3': give a number."),
    "aggregate": (train(aggregate="mean"), "aggregate is 'mean': give an aggregation such as"),
    "resume": (train(resume="a.safetensors"), "give what offbeat.checkpoint.load(file) returns."),
    "concurrency": (lambda: offbeat.Asynchronous(0), "the concurrency is 0: give a whole number of at"),
    "cohort": (lambda: offbeat.Synchronous(2.5), "the cohort is 2.5"),  # type: ignore[arg-type]
    "rate": (lambda: offbeat.Poisson("a"), "the rate of poisson dispatch is 'a'"),  # type: ignore[arg-type]
    "alpha": (lambda: offbeat.Dirichlet("a"), "alpha of dirichlet is 'a'"),  # type: ignore[arg-type]
    "steps": (lambda: offbeat.Steps("a", 2), "the number of local steps is 'a'"),  # type: ignore[arg-type]
    "delay": (lambda: offbeat.Exponential("1"), "the mean of an exponential delay is '1'"),  # type: ignore[arg-type]
    "share": (lambda: offbeat.Cycle(1, "a"), "the share of a cycle is 'a': give a number."),  # type: ignore[arg-type]
    "dropout": (lambda: offbeat.Dropout("a"), "the drop-out probability is 'a'"),  # type: ignore[arg-type]
    "kind of tiers": (lambda: offbeat.Tiers(3), "unknown kind of tiers '3'"),  # type: ignore[arg-type]
    "local rate": (lambda: offbeat.FedOpt("a", 1.0), "the local_lr of FedOpt must be a number"),  # type: ignore[arg-type]
    "delays as text": (lambda: offbeat.Vectorised(PROBLEM, CLIENTS, "tiers:mild"), "delays is 'tiers:mild'"),  # type: ignore[arg-type]
    "problem": (lambda: offbeat.Sequential(nn.Linear(3, 2), CLIENTS), "give an offbeat.Problem."),  # type: ignore[arg-type]
    "population": (lambda: offbeat.Sequential(PROBLEM, DATA), "give an offbeat.Population."),  # type: ignore[arg-type]
    "module": (lambda: offbeat.Problem("mlp", nn.functional.mse_loss), "give a torch.nn.Module."),  # type: ignore[arg-type]
    "loss": (lambda: offbeat.Problem(nn.Linear(3, 2), nn.MSELoss), "the loss is the class MSELoss"),
    "parts": (lambda: offbeat.Population(DATA, "ab", offbeat.Steps(1, 2)), "the parts of a population are"),  # type: ignore[arg-type]
    "part": (lambda: offbeat.Population(DATA, [0, 1], offbeat.Steps(1, 2)), "the part of client 0 is 0"),  # type: ignore[arg-type, list-item]
    "work": (lambda: offbeat.Population(DATA, PARTS, 5), "give offbeat.Steps or offbeat.Epochs."),  # type: ignore[arg-type]
    "vector": (lambda: offbeat.evaluate(PROBLEM, torch.zeros(3), DATA), "and the module 8 parameters"),
    "metrics": (
        lambda: offbeat.evaluate(PROBLEM, torch.zeros(8), DATA, []),
        "give a dictionary of functions",
    ),  # type: ignore[arg-type]
    "participation": (lambda: offbeat.Participation("3"), "max_participations is '3'"),  # type: ignore[arg-type]
    "bounds": (lambda: offbeat.Private(1.0, 1.0, 1e-5), "give pairs of a field and its bound"),  # type: ignore[arg-type]
    "recorded": (lambda: offbeat.Recorded(3), "recorded delays are 3: give a path"),  # type: ignore[arg-type]
    "recorded seconds": (lambda: offbeat.Recorded([1.0, -2.0]), "a recorded delay is -2.0"),
    "deadline, a number": (lambda: offbeat.TaskLimits(30), "the deadline is 30: give one such as offbeat.Fi"),  # type: ignore[arg-type]
    "deadline, a text": (lambda: offbeat.FixedDeadline("x"), "the deadline is 'x': give a number."),  # type: ignore[arg-type]
    "quantile": (lambda: offbeat.QuantileDeadline("x"), "the quantile of a deadline is 'x'"),  # type: ignore[arg-type]
    "limits": (lambda: offbeat.Vectorised(PROBLEM, CLIENTS, limits=30), "limits is 30: give an offbeat.Task"),  # type: ignore[arg-type]
    "shares": (
        lambda: offbeat.ClientCycle(9, lambda client: "x").bind(0)(3, 0.0),  # type: ignore[arg-type, return-value]
        "the share of a cycle is 'x': give a number.",
    ),
    "trimmed mean": (lambda: offbeat.TrimmedMean("x"), "the share of a trimmed mean is 'x'"),  # type: ignore[arg-type]
    "top-k": (lambda: offbeat.TopK("x"), "the share of top-k is 'x': give a number."),  # type: ignore[arg-type]
    "compress, a text": (train(compress="8bit"), "compress is '8bit': give offbeat.EightBit() or"),
    "compress, a class": (
        train(compress=offbeat.TopK),
        "compress is the class TopK: give offbeat.EightBit()",
    ),
    "slots": (lambda: offbeat.OpenSlots(3, 0), "the number of open slots is 0: give a whole number"),
    "slots, a text": (lambda: offbeat.OpenSlots("3"), "the concurrency is '3': give a whole number"),  # type: ignore[arg-type]
    "release period": (
        train(dispatch=offbeat.TimedPoisson("x", 0.5)),  # type: ignore[arg-type]
        "the release period is 'x': give a number.",
    ),
    "values to compare": (
        lambda: offbeat.advise("constant:1", 9, concurrency=iter([4])),  # type: ignore[arg-type]
        "give a list of the values to compare.",
    ),
    "setting": (
        lambda: offbeat.run(offbeat.LearningTask(module=nn.Linear(3, 2), data={"a": DATA}), seed=None),
        "seed must be a whole number, not None.",
    ),
    "devices": (lambda: offbeat.Devices([3]), "a device is 3: give an offbeat.DeviceProfile."),  # type: ignore[list-item]
    "device": (
        lambda: offbeat.Devices([offbeat.DeviceProfile("a", 1, 1)]),  # type: ignore[arg-type]
        "seconds_per_step of a device is 'a': give a number.",
    ),
    "local optimiser": (
        lambda: LocallyOptimized(offbeat.FedOpt(0.1, 1.0), LocalAdam),  # type: ignore[arg-type]
        "the local optimiser is the class LocalAdam: give one such as LocalAdam().",
    ),
    "personal layers": (
        lambda: offbeat.LearningTask(module=nn.Linear(3, 2), data=DATA, personal=[3]),  # type: ignore[list-item]
        "must be names or patterns, not [3]",
    ),
    "natural ids": (lambda: offbeat.Natural().split(np.arange(4), 2), "pass them as groups="),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_the_wrong_kind_is_one_sentence(name: str) -> None:
    call, sentence = VALUES[name]
    with pytest.raises(offbeat.InputError) as caught:
        call()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert offbeat.Asynchronous(np.int64(3)).concurrency == 3  # type: ignore[arg-type]
    assert offbeat.Exponential(np.float32(0.5)).mean == 0.5  # type: ignore[arg-type]


def test_clients_of_a_small_model_are_computed_with_one_thread_and_others_keep_theirs() -> None:
    seen = set()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = offbeat.Vectorised(offbeat.Problem(nn.Linear(3, 2), loss), CLIENTS)
        steps = offbeat.train(**ARGUMENTS | {"engine": engine})
        next(steps)
        seen.clear()
        next(steps)
        assert (seen, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)
