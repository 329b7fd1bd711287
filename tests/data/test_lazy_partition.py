"""Parts that are computed when they are asked for."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import Examples, InputError, Population, Steps
from offbeat.data.partition import LazyBlocks, LazyRandom

DATA = Examples(torch.arange(10.0), torch.zeros(10))


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 40))
def test_blocks_are_the_data_repeated_and_cut(clients: int, size: int, examples: int) -> None:
    size = min(size, examples)
    parts = LazyBlocks(clients, size, examples)
    whole = np.concatenate([parts[client] for client in range(len(parts))])
    assert np.array_equal(whole, np.resize(np.arange(examples), clients * size))


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


@pytest.mark.parametrize("parts", [LazyBlocks(10**7, 4, 10), LazyRandom(10**7, 2, 4, 10)])
def test_ten_million_clients_make_a_population_and_travel_to_other_processes(
    parts: LazyBlocks | LazyRandom,
) -> None:
    population = Population(DATA, parts, Steps(1, 2))
    assert len(population) == 10**7
    assert population.size(10**7 - 1) == len(parts[10**7 - 1])
    assert len(population.indices(10**7 - 1, 0, seed=0)[0]) == 2
    assert len(pickle.dumps(parts)) < 500


def test_clients_that_are_not_there_have_no_part() -> None:
    for parts in (LazyBlocks(3, 2, 10), LazyRandom(3, 1, 2, 10)):
        for client in (-1, 3):
            with pytest.raises(IndexError):
                parts[client]


def test_parts_of_other_data_are_refused_when_the_client_trains() -> None:
    population = Population(DATA, LazyBlocks(100, 5, 20), Steps(1, 2))
    population.indices(0, 0, seed=0)
    with pytest.raises(InputError, match=r"client 3 has an example index outside 0\.\.9"):
        population.indices(3, 0, seed=0)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: LazyBlocks(0, 1, 1), "number of clients is 0"),
        (lambda: LazyBlocks(1, 0, 10), "0 of 10 examples"),
        (lambda: LazyBlocks(1, 11, 10), "11 of 10 examples"),
        (lambda: LazyRandom(1, 0, 5, 10), "from 0 to 5"),
        (lambda: LazyRandom(1, 5, 4, 10), "from 5 to 4"),
        (lambda: LazyRandom(1, 5, 11, 10), "11 of 10 examples"),
    ],
)
def test_parts_that_cannot_be_are_refused(make, wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        make()
