"""A compiled objective is the same function; torch's own tracer stands in for its code generator."""

import pytest
import torch

from offbeat import Batch
from offbeat.draws import generator
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
