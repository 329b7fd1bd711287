"""Plain and secure sums as a run uses them."""

import json
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat import Asynchronous, FedOpt, InputError, Setting, Vectorised, build, train
from offbeat.aggregate.mean import AggregationContext, Mean, PlainSum
from offbeat.aggregate.secure import Secure, SecureSum
from offbeat.core import AnyAlgorithm, Cohort, SavedState, Task
from offbeat.privacy.secure.terms import LengthError, LongBatchError, OverlapError, ShortBatchError
from offbeat.schedule.delays import Exponential
from offbeat.schedule.staleness import Equal, Polynomial, StalenessWeights
from offbeat.training.loop import describe_cohort
from oracles.fixed_point import fixed_point_sum
from worlds import make_world


class Upload(NamedTuple):
    delta: Tensor
    more: tuple[Tensor, Tensor]


def opened(
    secure: Secure = Secure(minimum=2),
    weights: StalenessWeights = Equal(),
    buffer: int = 4,
    algorithm: AnyAlgorithm = FedOpt(0.1, 1.0),
    population: int = 50,
) -> SecureSum:
    dispatch = Asynchronous(5)
    opening = AggregationContext(
        algorithm, torch.zeros(3), dispatch, weights, buffer, population, 5, float("inf"), seed=3
    )
    return secure.open(opening)


def tasks(*clients: int, version: int = 0, visit: int = 0) -> tuple[Task, ...]:
    return tuple(Task(client, version, visit) for client in clients)


def cohort(those: tuple[Task, ...], version: int = 0, weights: StalenessWeights = Equal()) -> Cohort:
    return describe_cohort(those, version, 50, weights)


@given(
    st.integers(3, 4), st.sampled_from([torch.float32, torch.float64]), st.booleans(), st.integers(0, 10**6)
)
def test_a_secure_sum_of_a_tree_is_the_fixed_point_sum_leaf_by_leaf(
    count: int, dtype: torch.dtype, faded: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    delta, scalar = torch.randn(count, 2, 3, generator=draw), torch.randn(count, generator=draw)
    payload = Upload(delta.to(dtype), (scalar.double(), torch.arange(count)))
    weights: StalenessWeights = Polynomial(0.5) if faded else Equal()
    those = tuple(Task(client, client % 3, 0) for client in range(count))
    found = opened(weights=weights).total(payload, those, cohort(those, 4, weights))
    whole = [round(256 * weights(4 - task.version)) if faded else 1 for task in those]
    assert isinstance(found, Upload)
    for leaf, stack in (
        (found.delta, payload.delta),
        (found.more[0], scalar),
        (found.more[1], payload.more[1]),
    ):
        rows = list(stack.double().reshape(count, -1).numpy())
        plain = torch.from_numpy(fixed_point_sum(rows, whole, 16) / (256 if faded else 1))
        assert leaf.shape == stack.shape[1:]
        assert torch.equal(leaf.reshape(-1), plain.to(leaf.dtype))
    assert (found.delta.dtype, found.more[0].dtype) == (dtype, torch.float64)
    assert found.more[1].dtype == torch.get_default_dtype()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to sum from")
def test_uploads_on_a_gpu_are_summed_there_and_back() -> None:
    those = tasks(1, 2)
    found = opened().total((torch.ones(2, 3, device="cuda"),), those, cohort(those))
    assert found[0].is_cuda
    assert found[0].tolist() == [2.0, 2.0, 2.0]


def test_half_precision_is_summed_exactly_too() -> None:
    those = tasks(1, 2)
    stack = torch.tensor([[0.5, -3.0], [0.25, 1.0]], dtype=torch.bfloat16)
    (found,) = opened().total((stack,), those, cohort(those))
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [0.75, -2.0]


def test_rounding_at_random_is_keyed_by_seed_client_and_visit() -> None:
    stack = torch.full((2, 500), 0.3)
    runs = []
    for visit in (0, 0, 1):
        those = tasks(1, 2, visit=visit)
        runs.append(opened(Secure(2, bits=1, stochastic=True)).total((stack,), those, cohort(those))[0])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert set(runs[0].tolist()) == {0.0, 0.5, 1.0}


@pytest.mark.parametrize("secure", [Secure(bits=9), Secure(bits=9, stochastic=True)])
def test_no_number_is_moved_by_more_than_is_said(secure: Secure) -> None:
    those = tasks(*range(5))
    stack = torch.rand(5, 400, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (found,) = opened(secure, buffer=5).total((stack,), those, cohort(those))
    error = (found - stack.sum(0)).abs().max().item()
    assert secure.rounding / 2 < error <= 5 * secure.rounding
    assert PlainSum().rounding == 0


def test_the_start_of_everybody_is_summed_in_pieces() -> None:
    world = make_world(clients=25)
    algorithm = build("adamasfl", Setting(5, 3, 5), {})
    shots = [run(algorithm, world, aggregate) for aggregate in (Mean(), Mean(Secure(bits=24)))]
    torch.testing.assert_close(shots[0], shots[1], rtol=0, atol=1e-5)
    assert not torch.equal(shots[0], shots[1])


def run(
    algorithm: AnyAlgorithm,
    world: object,
    aggregate: Mean,
    weights: StalenessWeights = Equal(),
) -> Tensor:
    engine = Vectorised(world.problem, world.population, Exponential(1.0))  # type: ignore[attr-defined]
    shots = list(
        train(
            algorithm,
            engine,
            dispatch=Asynchronous(8),
            buffer=5,
            rounds=5,
            aggregate=aggregate,
            weights=weights,
        )
    )
    return shots[-1].x


@pytest.mark.parametrize("weights", [Equal(), Polynomial(0.5)])
def test_a_run_with_secure_sums_learns_what_one_without_does(weights: StalenessWeights) -> None:
    world = make_world(clients=12)
    plain, secure, coarse = (
        run(FedOpt(0.1, 1.0), world, aggregate, weights)
        for aggregate in (Mean(), Mean(Secure(3, 18, weight_bits=10)), Mean(Secure(3, 4, weight_bits=10)))
    )
    torch.testing.assert_close(plain, secure, rtol=0, atol=2e-4)
    assert (plain - coarse).abs().max() > 1e-3  # so that the closeness above says something


def test_a_run_that_is_resumed_gives_the_same_bits_and_counts_nothing_twice() -> None:
    world = make_world(clients=12)
    options = {"dispatch": Asynchronous(8), "buffer": 5, "rounds": 6}
    aggregate = Mean(Secure(3, stochastic=True))

    def engine() -> Vectorised:
        return Vectorised(world.problem, world.population, Exponential(1.0))

    whole, saved = [], None
    for shot in train(FedOpt(0.1, 1.0), engine(), aggregate=aggregate, **options):  # type: ignore[arg-type]
        whole.append(shot)
        saved = shot.checkpoint() if shot.version == 3 else saved
    assert saved is not None
    facts = json.loads(json.dumps(saved.facts))
    assert sum(np.diff(facts["aggregate"]["counted"]["bounds"])[::2]) == 15
    rest = list(train(FedOpt(0.1, 1.0), engine(), aggregate=aggregate, resume=saved, **options))  # type: ignore[arg-type]
    assert [shot.version for shot in rest] == [4, 5, 6]
    for left, right in zip(whole[4:], rest, strict=True):
        assert torch.equal(left.x, right.x)


def test_what_was_counted_before_a_checkpoint_is_refused_after_it() -> None:
    first = opened()
    first.total((torch.ones(2, 3),), tasks(1, 2), cohort(tasks(1, 2)))
    second = opened()
    second.load(SavedState(json.loads(json.dumps(first.save().facts)), {}))
    with pytest.raises(OverlapError, match="visit 0 of client 2 of this batch was added before"):
        second.total((torch.ones(2, 3),), tasks(2, 3), cohort(tasks(2, 3)))
    second.total((torch.ones(2, 3),), tasks(3, 4), cohort(tasks(3, 4)))
    third = opened()
    third.load(opened().save())  # from before the first sum
    third.total((torch.ones(2, 3),), tasks(1, 2), cohort(tasks(1, 2)))


def test_a_client_that_is_twice_in_a_buffer_is_one_distinct_client() -> None:
    twice = (Task(1, 0, 0), Task(1, 0, 1), Task(2, 0, 0), Task(3, 0, 0))
    (total,) = opened().total((torch.ones(4, 3),), twice, cohort(twice))
    assert total.tolist() == [4.0, 4.0, 4.0]
    with pytest.raises(ShortBatchError, match="at least 4 distinct clients, not 3"):
        opened(Secure(minimum=4)).total((torch.ones(4, 3),), twice, cohort(twice))
    with pytest.raises(ShortBatchError, match=r"like 2\.67 clients of equal weight"):
        opened(Secure(minimum=3)).total((torch.ones(4, 3),), twice, cohort(twice))


def test_a_run_whose_buffers_have_too_few_clients_says_so() -> None:
    with pytest.raises(ShortBatchError, match="at least 5 distinct clients, not"):
        run(FedOpt(0.1, 1.0), make_world(clients=8), Mean(Secure(5)))


def test_a_value_that_does_not_fit_is_refused_before_anything_is_counted() -> None:
    summing = opened()
    with pytest.raises(
        InputError, match=r"client 2 has a value of size 9000, .* holds 8192 a coordinate: clip"
    ):
        summing.total((torch.tensor([[1.0], [9000.0]]),), tasks(1, 2), cohort(tasks(1, 2)))
    summing.total((torch.tensor([[1.0], [90.0]]),), tasks(1, 2), cohort(tasks(1, 2)))


def test_uploads_keep_their_length_and_buffers_their_size() -> None:
    summing = opened()
    summing.total((torch.ones(2, 3),), tasks(1, 2), cohort(tasks(1, 2)))
    with pytest.raises(LengthError, match="visit 0 of client 3 has 4 numbers, not the 3 agreed on"):
        summing.total((torch.ones(2, 4),), tasks(3, 4), cohort(tasks(3, 4)))
    five = tasks(*range(3, 8))
    with pytest.raises(LongBatchError, match="ask for at most 4 at a time"):
        summing.total((torch.ones(5, 3),), five, cohort(five))


def test_weights_other_than_the_runs_own_are_refused() -> None:
    those = tasks(1, 2)
    with pytest.raises(InputError, match="only the staleness weights of the run"):
        opened().total((torch.ones(2, 3),), those, cohort(those, 3, Polynomial(0.5)))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"minimum": 1}, "a secure sum of 1 clients hides nobody"),
        ({"bits": 31}, "1 to 30 fractional bits, not 31"),
        ({"weight_bits": -1}, "weights need 0 to 16 bits, not -1"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(wrong: dict[str, int], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Secure(**wrong)


def test_a_buffer_or_a_population_that_is_too_small_is_refused_as_a_run_begins() -> None:
    with pytest.raises(InputError, match="a buffer of 4 from 50 clients never has them: raise the buffer"):
        opened(Secure(minimum=5))
    with pytest.raises(InputError, match="a buffer of 4 from 3 clients never has them"):
        opened(Secure(minimum=4), population=3)


def test_what_is_summed_in_secret_does_not_leave_clients_as_running_statistics() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    with pytest.raises(InputError, match=r"running statistic .* would leave clients"):
        run(FedOpt(0.1, 1.0), make_world(clients=12, module=module), Mean(Secure(3)))
