from collections.abc import Sequence

import numpy as np
import pytest
import torch

from offbeat import draws
from offbeat.data.population import Epochs, Examples, Population, Steps
from offbeat.errors import InputError

DATA = Examples(torch.arange(12.0).reshape(6, 2), torch.arange(6))
PARTS = [np.array([5, 0]), np.array([1, 2, 4])]


def test_a_client_draws_from_its_own_examples_by_seed_client_and_visit():
    population = Population(DATA, PARTS, Steps(4, 3))
    batches = population.indices(1, 7, seed=3)
    expected = Steps(4, 3).draw(3, draws.generator(3, "batches", 1, 7))
    assert [list(batch) for batch in batches] == [list(PARTS[1][batch]) for batch in expected]
    for other in (population.indices(1, 8, seed=3), population.indices(1, 7, seed=4)):
        assert not np.array_equal(np.concatenate(batches), np.concatenate(other))


def test_it_knows_its_sizes():
    population = Population(DATA, PARTS, Epochs(1, 2))
    assert len(population) == 2
    assert [population.size(client) for client in range(2)] == [2, 3]
    assert population.data.total == 6


def test_moving_changes_floating_tensors_only():
    data = Examples({"a": torch.zeros(2), "b": torch.zeros(2, 3, dtype=torch.uint8)}, torch.arange(2))
    moved = Population(data, [np.arange(2)], Steps(1, 1)).to("cpu", torch.float64)
    assert moved.data.inputs["a"].dtype == torch.float64
    assert moved.data.inputs["b"].dtype == torch.uint8
    assert moved.data.targets.dtype == torch.int64
    assert isinstance(moved.data, Examples)


@pytest.mark.parametrize("pair", [tuple, list])
def test_the_examples_may_be_a_plain_pair(pair):
    population = Population(pair(DATA), PARTS, Steps(1, 1))
    assert isinstance(population.data, Examples)
    assert population.data.targets is DATA.targets


@pytest.mark.parametrize("data", [DATA.inputs, (DATA.inputs,), (*DATA, DATA.targets), None])
def test_examples_that_are_no_pair_are_refused(data):
    with pytest.raises(
        InputError, match=r"are not a pair of inputs and targets: give Examples\(inputs, targets\)"
    ):
        Population(data, PARTS, Steps(1, 1))


def test_an_empty_client_is_named():
    with pytest.raises(InputError, match="client 1 has no examples: use fewer clients"):
        Population(DATA, [np.array([0]), np.array([], np.int64)], Steps(1, 1))


@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_out_of_range_names_the_client(index):
    with pytest.raises(InputError, match=r"client 1 has an example index outside 0\.\.5"):
        Population(DATA, [np.array([0]), np.array([1, index])], Steps(1, 1))


def test_parts_that_are_not_whole_numbers_are_refused():
    with pytest.raises(InputError, match="give integers"):
        Population(DATA, [np.array([0.0, 1.0])], Steps(1, 1))


def test_no_clients_are_refused():
    with pytest.raises(InputError, match="no clients"):
        Population(DATA, [], Steps(1, 1))


@pytest.mark.parametrize("inputs", [{"a": torch.zeros(6), "b": torch.zeros(5)}, torch.zeros(5, 2)])
def test_unequal_first_axes_are_refused(inputs):
    with pytest.raises(InputError, match="5 and 6"):
        Population(Examples(inputs, torch.zeros(6)), PARTS, Steps(1, 1))


@pytest.mark.parametrize("inputs", [[1.0, 2.0], torch.tensor(1.0), np.zeros(6)])
def test_examples_that_are_not_tensors_with_rows_are_refused(inputs):
    with pytest.raises(InputError, match="not tensors with a first axis"):
        Population(Examples(inputs, torch.zeros(6)), PARTS, Steps(1, 1))


class Lazy(Sequence):
    def __init__(self, clients):
        self.clients, self.read = clients, []

    def __len__(self):
        return self.clients

    def __getitem__(self, client):
        self.read.append(client)
        return np.array([client % 6, (client + 1) % 6] if client % 1000 else [], np.int64)


def test_lazy_parts_are_read_only_for_the_clients_that_train():
    parts = Lazy(10_000_000)
    population = Population(DATA, parts, Steps(2, 1)).to(dtype=torch.float64)
    assert len(population) == 10_000_000
    assert sorted(np.concatenate(population.indices(9_999_999, 0, 0))) == [3, 4]
    assert parts.read == [9_999_999]
    with pytest.raises(InputError, match="client 5000 has no examples"):
        population.indices(5000, 0, 0)
