"""A compiled objective is the same function; torch's own tracer stands in for its code generator."""

import shutil

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from offbeat import Batch
from offbeat.draws import generator
from offbeat.engines.vmap import CompiledGradient, CompiledMap
from offbeat.nn.layers import with_keyed_dropout
from worlds import make_world


@pytest.mark.slow
def test_a_compiled_gradient_is_the_plain_one() -> None:
    world = make_world()
    problem = world.problem
    x, statistics = problem.initial()
    x = x + 0.1 * torch.from_numpy(generator(1, "x").standard_normal(len(x))).to(x)
    inputs, targets = world.population.data
    compiled = problem.compiled("aot_eager")
    for size in (4, 7):
        batch = Batch((inputs[:size], targets[:size]))
        for one, other in zip(
            compiled(x, statistics, batch)[:2],
            problem.differentiate_by_autograd(x, statistics, batch)[:2],
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_a_compiled_map_is_the_mapped_function_for_every_client() -> None:
    world = make_world()
    problem = world.problem
    x, statistics = problem.initial()
    clients = x + 0.1 * torch.from_numpy(generator(2, "x").standard_normal((3, len(x)))).to(x)
    inputs, targets = world.population.data
    data = inputs[:12].reshape(3, 4, -1), targets[:12].reshape(3, 4)
    compiled = CompiledGradient(problem, "eager")

    def work(x: torch.Tensor, *data: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = Batch(data)
        one, _ = compiled.descend(x, statistics, batch, 0.5)
        two, loss, _ = compiled(one, statistics, batch)
        return one, two, loss

    for _ in range(2):
        found = vmap(work)(clients, *data)
        for row in range(3):
            batch = Batch((inputs[4 * row : 4 * row + 4], targets[4 * row : 4 * row + 4]))
            grad, _, _ = problem.differentiate_by_autograd(clients[row], statistics, batch)
            stepped = clients[row] - 0.5 * grad
            expected = (stepped, *problem.differentiate_by_autograd(stepped, statistics, batch)[:2])
            for each, other in zip(found, expected, strict=True):
                torch.testing.assert_close(each[row], other, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within torch
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's code generator needs a compiler")
def test_the_code_generator_draws_the_same_dropout() -> None:
    layer = with_keyed_dropout(nn.Sequential(nn.Dropout(0.3)))

    def drop(inputs: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = functional_call(layer, {"0.key": key.clone()}, (inputs,))
        return dropped

    inputs, keys = torch.ones(3, 10, 20), torch.tensor([5, 7, 123456789012])
    assert torch.equal(vmap(CompiledMap(drop))(inputs, keys), vmap(drop)(inputs, keys))
