"""Parts that are computed when they are asked for."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import Examples, InputError, Population, Steps
from offbeat.data.partition import LazyRandom

DATA = Examples(torch.arange(10.0), torch.zeros(10))


@given(st.integers(0, 10**7 - 1), st.integers(0, 2**31))
@settings(max_examples=50)
def test_a_drawn_part_is_of_allowed_size_and_without_repeats(client: int, seed: int) -> None:
    part = LazyRandom(10**7, 3, 8, 10, seed)[client]
    assert 3 <= len(part) <= 8
    assert len(set(part.tolist())) == len(part)
    assert part.min() >= 0
    assert part.max() < 10


def test_a_drawn_part_is_a_function_of_the_seed_and_the_client() -> None:
    parts = LazyRandom(1_000, 3, 8, 10_000, seed=1)
    assert np.array_equal(parts[7], LazyRandom(10**7, 3, 8, 10_000, seed=1)[7])
    assert not np.array_equal(parts[7][:3], parts[8][:3])
    assert not np.array_equal(parts[7][:3], LazyRandom(1_000, 3, 8, 10_000, seed=2)[7][:3])


def test_ten_million_clients_make_a_population_and_travel_to_other_processes() -> None:
    parts = LazyRandom(10**7, 2, 4, 10)
    population = Population(DATA, parts, Steps(1, 2))
    assert len(population) == 10**7
    assert population.size(10**7 - 1) == len(parts[10**7 - 1])
    assert len(population.indices(10**7 - 1, 0, seed=0)[0]) == 2
    assert len(pickle.dumps(parts)) < 500


def test_clients_that_are_not_there_have_no_part() -> None:
    parts = LazyRandom(3, 1, 2, 10)
    for client in (-1, 3):
        with pytest.raises(IndexError):
            parts[client]


def test_parts_of_other_data_are_refused_when_the_client_trains() -> None:
    parts = LazyRandom(1000, 5, 5, 20)
    inside = next(client for client in range(1000) if parts[client].max() <= 9)
    outside = next(client for client in range(1000) if parts[client].max() > 9)
    population = Population(DATA, parts, Steps(1, 2))
    population.indices(inside, 0, seed=0)
    with pytest.raises(InputError, match=rf"client {outside} has an example index outside 0\.\.9"):
        population.indices(outside, 0, seed=0)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: LazyRandom(0, 1, 1, 1), "number of clients is 0"),
        (lambda: LazyRandom(1, 0, 0, 10), "0 of 10 examples"),
        (lambda: LazyRandom(1, 0, 5, 10), "from 0 to 5"),
        (lambda: LazyRandom(1, 5, 4, 10), "from 5 to 4"),
        (lambda: LazyRandom(1, 5, 11, 10), "11 of 10 examples"),
    ],
)
def test_parts_that_cannot_be_are_refused(make, wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        make()
