import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat import Examples, Problem, accuracy, ema, evaluate

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
