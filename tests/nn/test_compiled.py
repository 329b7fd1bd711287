"""A compiled objective is the same function; torch's own tracer stands in for its code generator."""

import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from offbeat import Asynchronous, Batch, Cadence, FedOpt, Problem, Sequential, Synchronous, Vectorised
from offbeat.draws import generator
from offbeat.engines import vmap as vmap_module
from offbeat.engines.execution import Vmap
from offbeat.engines.vmap import CompiledGradient, CompiledMap
from offbeat.nn.layers import with_keyed_dropout
from worlds import make_world, play


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


def test_each_problem_is_compiled_however_many_were_before() -> None:
    made: list[object] = []

    def count(graph: torch.fx.GraphModule, examples: object) -> Any:
        made.append(graph)
        return graph.forward

    world = make_world()
    inputs, targets = world.population.data
    batch = Batch((inputs[:4], targets[:4]))
    with torch._dynamo.config.patch(recompile_limit=1):  # of the same code, by default 8
        for hidden in (3, 4, 5):
            layers = nn.Linear(inputs.shape[1], hidden), nn.Linear(hidden, 3)
            problem = Problem(nn.Sequential(*layers).double(), world.problem.loss)
            problem.compiled(count)(*problem.initial(), batch)  # type: ignore[arg-type]
    assert len(made) == 3


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


def test_rows_of_models_are_aligned_from_step_to_step_and_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vmap_module, "_LONG_ROW", 4)
    world = make_world(weight_decay=0.1)
    problem = world.problem
    x, statistics = problem.initial()
    assert x.numel() * x.element_size() % vmap_module._ALIGNMENT
    clients = x + 0.1 * torch.from_numpy(generator(2, "x").standard_normal((3, len(x)))).to(x)
    inputs, targets = world.population.data
    data = inputs[:12].reshape(3, 4, -1), targets[:12].reshape(3, 4)
    compiled, rows = CompiledGradient(problem, "eager"), []

    def work(x: torch.Tensor, rate: torch.Tensor, *data: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x, _ = compiled.descend(x, statistics, Batch(data), rate)
        return x

    real = CompiledMap.stacked

    def stacked(self: CompiledMap, *given: Any) -> tuple[torch.Tensor, ...]:
        outputs = real(self, *given)
        rows.append(outputs[0].stride(0) * x.element_size())
        return outputs

    monkeypatch.setattr(CompiledMap, "stacked", stacked)
    for start in (clients, x):  # each with a model and a rate of its own, and all with the same
        dim, rate = (0, torch.full((3,), 0.5).to(x)) if start is clients else (None, torch.tensor(0.5).to(x))
        found = vmap(work, in_dims=(dim, dim, 0, 0))(start, rate, *data)
        assert found.shape == clients.shape
        for row in range(3):
            expected = start[row] if start is clients else start
            batch = Batch((inputs[4 * row : 4 * row + 4], targets[4 * row : 4 * row + 4]))
            for _ in range(3):
                expected = expected - 0.5 * problem.differentiate_by_autograd(expected, statistics, batch)[0]
            torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-10)
    assert len(rows) == 6
    assert not any(stride % vmap_module._ALIGNMENT for stride in rows)
    assert len(compiled._step._compiled) == 1


def test_a_message_that_all_share_is_not_stacked_and_gives_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **rest: graph)
    stacked, real = [], vmap_module.stacked_inputs
    monkeypatch.setattr(
        vmap_module,
        "stacked_inputs",
        lambda starts, *rest: stacked.append(starts[0].message) or real(starts, *rest),
    )
    world = make_world()
    engines = (
        Sequential(world.problem, world.population),
        Vectorised(world.problem, world.population, execution=Vmap(compiled=True)),
    )
    for method in (FedOpt(0.1, 1.0), Cadence.tuned(3)):
        stacked.clear()
        one, other = (play(method, engine, Synchronous(4), buffer=4)[-1].x for engine in engines)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
        assert stacked
        assert all(message == () for message in stacked)
    one, other = (play(FedOpt(0.1, 1.0), engine, Asynchronous(8), buffer=3)[-1].x for engine in engines)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert any(message != () for message in stacked)  # of tasks of several versions


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
