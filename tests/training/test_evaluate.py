import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn.metrics import accuracy_score, f1_score, log_loss, roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat import (
    ClientData,
    ClientMetrics,
    Examples,
    InputError,
    Problem,
    accuracy,
    ema,
    evaluate,
    evaluate_clients,
)
from offbeat.data.readers import read_examples

EXAMPLES = Examples(torch.randn(23, 4, generator=torch.Generator().manual_seed(0)), torch.arange(23) % 3)


def problem(loss: object = cross_entropy) -> Problem:
    torch.manual_seed(0)
    return Problem(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), loss)  # type: ignore[arg-type]


def test_scores_do_not_depend_on_the_batch_size() -> None:
    x, _ = problem().initial()
    outputs = problem().outputs(x, EXAMPLES.inputs)
    for size in (1, 5, 23, 1000):
        scores = evaluate(problem(), x, EXAMPLES, {"accuracy": accuracy}, batch_size=size)
        assert scores["loss"] == pytest.approx(float(cross_entropy(outputs, EXAMPLES.targets)), rel=1e-6)
        assert scores["accuracy"] == (outputs.argmax(1) == EXAMPLES.targets).double().mean()


def test_a_loss_per_example_gives_the_same_mean() -> None:
    x, _ = problem().initial()
    each = problem(lambda outputs, targets: cross_entropy(outputs, targets, reduction="none"))
    assert evaluate(each, x, EXAMPLES)["loss"] == pytest.approx(
        evaluate(problem(), x, EXAMPLES)["loss"], rel=1e-6
    )


def test_a_metric_of_ones_own_may_give_one_number_per_batch_or_see_everything_first() -> None:
    class Largest:
        def reset(self) -> None:
            self.value = float("-inf")

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.value = max(self.value, float(outputs.max()))

        def compute(self) -> float:
            return self.value

    x, _ = problem().initial()
    outputs = problem().outputs(x, EXAMPLES.inputs)
    metrics = {"margin": lambda outputs, targets: outputs.mean(), "largest": Largest()}
    scores = evaluate(problem(), x, EXAMPLES, metrics, batch_size=7)
    assert scores["margin"] == pytest.approx(float(outputs.mean()), rel=1e-5)
    assert scores["largest"] == float(outputs.max())


def test_a_metric_may_give_a_plain_number_and_examples_may_be_a_plain_pair() -> None:
    x, _ = problem().initial()
    metrics = {
        "number": lambda outputs, targets: float(outputs.mean()),
        "tensor": lambda outputs, targets: outputs.mean(),
    }
    scores = evaluate(problem(), x, (EXAMPLES.inputs, EXAMPLES.targets), metrics, batch_size=7)
    assert scores["number"] == pytest.approx(scores["tensor"], rel=1e-12)
    assert scores == evaluate(problem(), x, EXAMPLES, metrics, batch_size=7)


def test_running_statistics_matter_to_the_score() -> None:
    torch.manual_seed(0)
    made = Problem(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), cross_entropy)
    x, statistics = made.initial()
    moved = {name: value + 1 for name, value in statistics.items()}
    assert evaluate(made, x, EXAMPLES, statistics=moved) != evaluate(made, x, EXAMPLES, statistics=statistics)


def test_the_average_moves_by_one_percent_of_the_way() -> None:
    average = ema(torch.zeros(2), torch.tensor([1.0, -2.0]), 0.99)
    torch.testing.assert_close(average, torch.tensor([0.01, -0.02]))


def binary(count: int = 997) -> tuple[Problem, Tensor, Examples]:
    """A binary problem whose last batch is small and whose first batches lack a class."""
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    targets = (inputs[:, 0] + 0.5 * inputs[:, 1] > 0.3).long()
    order = torch.cat([torch.nonzero(targets == 0), torch.nonzero(targets == 1)]).flatten()
    torch.manual_seed(0)
    module = Problem(nn.Linear(4, 2), cross_entropy)
    return module, module.initial()[0], Examples(inputs[order], targets[order])


def auc(outputs: Tensor, targets: Tensor) -> float:
    return float(roc_auc_score(targets, outputs.softmax(-1)[:, 1]))


def f1(outputs: Tensor, targets: Tensor) -> float:
    return float(f1_score(targets, outputs.argmax(-1)))


@pytest.mark.parametrize("size", [1, 7, 50, 996, 1000])
def test_metrics_equal_scikit_learn_whatever_the_batches(size: int) -> None:
    module, x, examples = binary()
    outputs = module.outputs(x, examples.inputs)
    probabilities, predicted = outputs.double().softmax(-1)[:, 1], outputs.argmax(-1)
    wanted = {
        "auc": roc_auc_score(examples.targets, probabilities),
        "f1": f1_score(examples.targets, predicted),
        "accuracy": accuracy_score(examples.targets, predicted),
        "perplexity": math.exp(log_loss(examples.targets, outputs.double().softmax(-1))),
    }
    functions = {
        "auc": lambda outputs, targets: roc_auc_score(targets, outputs.double().softmax(-1)[:, 1]),
        "f1": f1,
        "accuracy": accuracy,
        "perplexity": lambda outputs, targets: cross_entropy(outputs.double(), targets).exp(),
    }
    objects = {
        "auc": torchmetrics.AUROC(task="multiclass", num_classes=2, average=None),
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=2, average=None),
    }
    found = evaluate(module, x, examples, functions, batch_size=size)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-9), name
    plain = {"auc": torchmetrics.AUROC(task="binary"), "f1": torchmetrics.F1Score(task="binary")}
    accumulated = evaluate(_positive(module), x, examples, plain, batch_size=size)
    at_once = {name: metric(probabilities, examples.targets) for name, metric in plain.items()}
    for name, value in at_once.items():  # torchmetrics divides in single precision
        assert accumulated[name] == float(value)
        assert accumulated[name] == pytest.approx(wanted[name], abs=1e-7)
    with pytest.raises(InputError, match="'auc' gives 2 numbers: return one number"):
        evaluate(module, x, examples, {"auc": objects["auc"]}, batch_size=size)


def _positive(module: Problem) -> Problem:
    """The same with the probability of the second class as its output, as binary torchmetrics want it."""

    class Positive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs).double().softmax(-1)[:, 1]

    return Problem(Positive(), lambda outputs, targets: (outputs - targets) ** 2)


def test_the_mean_over_batches_would_be_another_number() -> None:
    """The mistake that a metric of one number guards against."""
    module, x, examples = binary()
    shuffled = torch.randperm(examples.total, generator=torch.Generator().manual_seed(2))
    examples = Examples(examples.inputs[shuffled], examples.targets[shuffled])
    outputs = module.outputs(x, examples.inputs)
    means = [auc(outputs[at : at + 50], examples.targets[at : at + 50]) for at in range(0, 950, 50)]
    assert abs(sum(means) / len(means) - auc(outputs, examples.targets)) > 1e-4
    assert evaluate(module, x, examples, {"auc": auc}, batch_size=50)["auc"] == auc(outputs, examples.targets)


@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        (torchmetrics.AUROC(task="multiclass", num_classes=5), "the metric 'm' could not be computed"),
        (
            lambda outputs, targets: roc_auc_score(targets, outputs[:, 7]),
            "could not be .*index 7 is out",
        ),
        (lambda outputs, targets: "good", "gives a str: return one number"),
        (lambda outputs, targets: outputs.mean(0), "gives 2 numbers: return one number, or one for each"),
        (torchmetrics.MetricCollection([torchmetrics.MeanMetric()]), "could not be computed|several values"),
        ("auc", "is a str: give a function of outputs and targets"),
    ],
)
def test_a_metric_that_does_not_suit_is_refused_in_one_sentence(metric: Any, sentence: str) -> None:
    module, x, examples = binary()
    with pytest.raises(InputError, match=sentence) as caught:
        evaluate(module, x, examples, {"m": metric}, batch_size=100)
    assert "\n" not in str(caught.value)


def test_a_metric_that_is_not_defined_is_nan() -> None:
    module, x, examples = binary()
    one_class = Examples(examples.inputs[:20], examples.targets[:20])
    assert math.isnan(evaluate(module, x, one_class, {"auc": auc})["auc"])
    binary_auc = {"auc": torchmetrics.AUROC(task="binary")}
    assert math.isnan(evaluate(_positive(module), x, one_class, binary_auc)["auc"])


def by_client() -> tuple[Problem, Tensor, ClientData]:
    module, x, examples = binary()
    owners = np.minimum(np.arange(examples.total) * 12 // examples.total, 10)
    shuffled = np.random.default_rng(0).permutation(owners)
    shuffled[:30] = 11  # a client with one class only
    names = np.array([f"hospital {n}" for n in range(12)])[shuffled]
    return module, x, ClientData.from_arrays(examples.inputs, examples.targets, by=names)


def test_clients_are_evaluated_one_by_one_and_together() -> None:
    module, x, data = by_client()
    found = evaluate_clients(module, x, data, {"auc": auc, "accuracy": accuracy}, batch_size=13)
    assert data.names is not None
    own = {
        name: evaluate(module, x, data.examples(name), {"auc": auc, "accuracy": accuracy})
        for name in data.names
    }
    for metric in ("loss", "auc", "accuracy"):
        assert found.clients[metric] == pytest.approx(
            {name: one[metric] for name, one in own.items()}, nan_ok=True
        )
    everything = [data.examples(name) for name in data.names]
    together = Examples(*(torch.cat(each) for each in zip(*everything, strict=True)))
    assert found.pooled == pytest.approx(evaluate(module, x, together, {"auc": auc, "accuracy": accuracy}))
    assert [name for name, value in found.clients["auc"].items() if math.isnan(value)] == ["hospital 11"]


def test_the_summary_over_clients_has_mean_worst_tenth_and_spread() -> None:
    values = {f"c{n}": float(n) for n in range(20)}
    found = ClientMetrics(
        {"auc": 0.5, "loss": 1.0}, {"auc": values | {"none": math.nan}, "loss": values}
    ).summary()
    assert found == {
        "auc": 0.5,
        "auc_mean": 9.5,
        "auc_worst_tenth": 0.5,
        "auc_spread": pytest.approx(np.std(range(20))),
        "loss": 1.0,
        "loss_mean": 9.5,
        "loss_worst_tenth": 18.5,
        "loss_spread": pytest.approx(np.std(range(20))),
    }


def test_clients_without_test_examples_are_left_out() -> None:
    module, x, data = by_client()
    some = ClientData.from_function(
        lambda name: (
            data.examples(name) if name != "hospital 0" else Examples(torch.zeros(0, 4), torch.zeros(0))
        ),
        data.names,
    )
    found = evaluate_clients(module, x, some, {"accuracy": accuracy}, lower_is_better=["accuracy"])
    assert "hospital 0" not in found.clients["accuracy"]
    worst = found.summary()["accuracy_worst_tenth"]
    assert worst == max(found.clients["accuracy"].values())
    none = ClientData.from_function(lambda name: Examples(torch.zeros(0, 4), torch.zeros(0)), ["a"])
    with pytest.raises(InputError, match="no client has test examples"):
        evaluate_clients(module, x, none)


def test_a_source_on_the_disk_is_evaluated_batch_by_batch(tmp_path: Path) -> None:
    module, x, examples = binary()
    np.save(tmp_path / "x.npy", examples.inputs.numpy())
    source = read_examples((np.load(tmp_path / "x.npy", mmap_mode="r"), examples.targets.numpy()))
    assert evaluate(module, x, source, {"auc": auc}, batch_size=100) == evaluate(
        module, x, examples, {"auc": auc}, batch_size=100
    )


def test_as_many_examples_as_suit_the_device_are_computed_at_once() -> None:
    sizes: list[int] = []

    class Counted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            sizes.append(len(input))
            return super().forward(input)

    examples = Examples(torch.randn(250, 4), torch.arange(250) % 3)
    each = Problem(Counted(4, 3), cross_entropy)
    whole = evaluate(each, each.initial()[0], examples, batch_size=250)
    assert evaluate(each, each.initial()[0], examples) == pytest.approx(whole, rel=1e-6)
    assert sizes == [250, 100, 100, 50]
