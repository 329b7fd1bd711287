from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat import (
    Asynchronous,
    Batch,
    Examples,
    FedOpt,
    InputError,
    Population,
    Problem,
    Sequential,
    Steps,
    Vectorised,
    train,
)
from offbeat.engines.local import TaskGradient
from offbeat.engines.process_pool import Workers


def batch(rows: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return Batch((inputs, torch.arange(rows) % 3))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def reference(module: nn.Module, data: Batch) -> Tensor:
    loss = cross_entropy(module(data.data[0]), data.data[1])
    slopes = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([slope.reshape(-1) for slope in slopes])


def test_both_gradients_are_that_of_the_module() -> None:
    module = network()
    problem = Problem(module, cross_entropy)
    x, statistics = problem.initial()
    for differentiate in (problem.differentiate, problem.differentiate_by_autograd):
        slope, _, left = differentiate(x, statistics, batch())
        torch.testing.assert_close(slope, reference(module, batch()), rtol=0, atol=1e-15)
        assert left == {}


def test_weight_decay_is_part_of_the_gradient() -> None:
    problem = Problem(network(), cross_entropy, weight_decay=0.1)
    x, _ = problem.initial()
    for differentiate in (problem.differentiate, problem.differentiate_by_autograd):
        slope, _, _ = differentiate(x, {}, batch())
        torch.testing.assert_close(slope, reference(network(), batch()) + 0.1 * x, rtol=0, atol=1e-15)


def test_masked_examples_do_not_count() -> None:
    problem = Problem(network(), lambda outputs, targets: cross_entropy(outputs, targets, reduction="none"))
    x, _ = problem.initial()
    whole = batch(6)
    masked = Batch(whole.data, torch.tensor([True, True, True, True, False, False]))
    short = Batch((whole.data[0][:4], whole.data[1][:4]))
    assert torch.allclose(
        problem.differentiate(x, {}, masked)[0], problem.differentiate(x, {}, short)[0], atol=1e-15
    )


def test_buffers_that_are_no_part_of_the_state_stay_and_do_not_travel() -> None:
    module = network()
    module.register_buffer("places", torch.arange(9), persistent=False)
    module.register_buffer("moments", torch.zeros(2, dtype=torch.float64))
    problem = Problem(module, cross_entropy)
    x, statistics = problem.initial()
    assert statistics.keys() == {"moments"}
    assert torch.equal(problem.module(x, statistics).places, torch.arange(9))


@pytest.mark.parametrize("engine", [Sequential, Vectorised, partial(Workers, workers=1)])
def test_a_frozen_layer_is_neither_changed_nor_sent_by_any_engine(engine: Callable[..., Any]) -> None:
    module = network()
    module[0].requires_grad_(False)
    losses = partial(cross_entropy, reduction="none")
    problem, parts = Problem(module, losses), [np.arange(client, 30, 5) for client in range(5)]
    clients = Population(Examples(*batch(30).data), parts, Steps(2, size=3))
    setting: dict[str, Any] = {"dispatch": Asynchronous(3), "buffer": 2, "rounds": 3}
    *_, shot = train(FedOpt(0.1, 1.0), engine(problem, clients), **setting)
    *_, reference = train(FedOpt(0.1, 1.0), Sequential(problem, clients), **setting)
    torch.testing.assert_close(shot.x, reference.x, rtol=1e-12, atol=1e-14)
    assert shot.x.shape == (5 * 3 + 3,)
    assert max(tensor.numel() for tensor in shot.checkpoint().tensors.values()) == 5 * 3 + 3
    trained = problem.module(shot.x)
    assert torch.equal(trained[0].weight, module[0].weight)
    assert not torch.equal(trained[2].weight, module[2].weight)


def test_frozen_parameters_stay_and_are_not_in_the_vector() -> None:
    module = network()
    module[0].requires_grad_(False)
    problem = Problem(module, cross_entropy)
    assert problem.size == 5 * 3 + 3
    slope, _, _ = problem.differentiate_by_autograd(problem.initial()[0], {}, batch())
    torch.testing.assert_close(slope, reference(network(), batch())[-problem.size :], rtol=0, atol=1e-15)


def test_tied_parameters_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False).double()
            self.second = nn.Linear(4, 4, bias=False).double()
            self.second.weight = self.first.weight

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.second(torch.tanh(self.first(inputs)))
            return outputs

    module = Tied()
    problem = Problem(module, cross_entropy)
    assert problem.size == 16
    for differentiate in (problem.differentiate, problem.differentiate_by_autograd):
        slope, _, _ = differentiate(problem.initial()[0], {}, batch())
        torch.testing.assert_close(slope, reference(module, batch()), rtol=0, atol=1e-15)


def test_the_callers_module_is_never_touched() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    module.train(mode=False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    problem = Problem(module, cross_entropy)
    x, statistics = problem.initial()
    problem.differentiate_by_autograd(x, statistics, batch())
    problem.outputs(x + 1, batch().data[0], statistics)
    assert not module.training
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_running_statistics_pass_from_step_to_step_as_in_the_module() -> None:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    problem = Problem(module, cross_entropy)
    x, statistics = problem.initial()
    grad = TaskGradient(problem, problem.differentiate_by_autograd, statistics)
    for rows in (6, 4, 5):
        grad(x, batch(rows))
        module(batch(rows).data[0])
    torch.testing.assert_close(grad.statistics["1.running_mean"], module[1].running_mean, rtol=0, atol=1e-15)
    torch.testing.assert_close(grad.statistics["1.running_var"], module[1].running_var, rtol=0, atol=1e-15)
    assert torch.equal(statistics["1.running_mean"], torch.zeros(5))


def test_padding_leaves_running_statistics_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    problem = Problem(module, cross_entropy)
    x, statistics = problem.initial()
    grad = TaskGradient(problem, problem.differentiate, statistics)
    grad(x, Batch(batch().data, torch.zeros(6, dtype=torch.bool)))
    assert torch.equal(grad.statistics["1.running_mean"], torch.zeros(5))


def test_inputs_may_be_several_arguments_or_named_ones() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3).double()

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            outputs: Tensor = self.linear(left - right)
            return outputs

    problem = Problem(Two(), cross_entropy)
    x, _ = problem.initial()
    inputs, targets = batch().data
    spread, *_ = problem.differentiate(x, {}, Batch(((inputs, 2 * inputs), targets)))
    named, *_ = problem.differentiate(x, {}, Batch(({"right": 2 * inputs, "left": inputs}, targets)))
    assert torch.equal(spread, named)


def test_the_trained_module_is_handed_back_with_its_statistics() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    problem = Problem(module, cross_entropy)
    x, statistics = problem.initial()
    statistics = {name: value + 1 for name, value in statistics.items()}
    made = problem.module(x + 1, statistics)
    assert not made.training
    torch.testing.assert_close(made(batch().data[0]), problem.outputs(x + 1, batch().data[0], statistics))
    torch.testing.assert_close(made[1].running_mean, torch.ones(5, dtype=torch.float64))


def test_a_module_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to train"):
        Problem(nn.ReLU(), cross_entropy)


def test_complex_parameters_are_refused_since_a_sum_would_drop_their_imaginary_parts() -> None:
    layer = nn.Linear(4, 3, dtype=torch.complex64)
    for modules in ([layer], [nn.Linear(4, 4), layer]):
        with pytest.raises(InputError, match="complex parameters are not supported, since updates are sums"):
            Problem(nn.Sequential(*modules), cross_entropy)


def test_a_module_of_mixed_dtypes_is_refused() -> None:
    with pytest.raises(InputError, match="one dtype"):
        Problem(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).double()), cross_entropy)
