"""Data of users, by client: frames, arrays, data sets, dictionaries and functions."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from offbeat import (
    Asynchronous,
    ClientData,
    Epochs,
    Examples,
    FedOpt,
    InputError,
    Problem,
    Sequential,
    Steps,
    Vectorised,
    train,
)
from offbeat.data.readers import labels_of, read_examples
from offbeat.data.sources import client_data
from offbeat.engines.process_pool import Workers

ROWS = 60
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
HOSPITALS = np.array(["Mercy", "St Mary", "Charité"])[np.arange(ROWS) % 3]


def columns() -> dict[str, Any]:
    return {"age": X[:, 0], "bp": X[:, 1], "hr": X[:, 2], "died": Y, "hospital": HOSPITALS}


def frame(kind: str) -> Any:
    if kind == "pandas":
        import pandas

        return pandas.DataFrame(columns())
    import polars

    return polars.DataFrame(columns())


def rows(data: ClientData, name: str) -> list[list[float]]:
    examples = data.examples(name)
    return torch.cat([examples.inputs, examples.targets[:, None].float()], 1).tolist()


def expected(name: str) -> list[list[float]]:
    chosen = name == HOSPITALS
    return np.concatenate([X[chosen], Y[chosen, None]], 1).tolist()


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_a_frame_is_divided_by_a_column_and_keeps_the_names(kind: str) -> None:
    data = ClientData.from_frame(frame(kind), by="hospital", target="died", inputs=["age", "bp", "hr"])
    assert data.names == ("Charité", "Mercy", "St Mary")
    assert len(data) == 3
    for name in data.names:
        assert rows(data, name) == expected(name)
    assert data.examples("Mercy").targets.dtype == torch.int64
    assert data.examples("Mercy").inputs.dtype == torch.float32


def test_inputs_are_all_other_columns_unless_they_are_named() -> None:
    every = ClientData.from_frame(frame("pandas"), by="hospital", target="died")
    assert rows(every, "Mercy") == expected("Mercy")
    one = ClientData.from_frame(frame("pandas"), by="hospital", target="died", inputs="bp")
    assert one.examples("Mercy").inputs.tolist() == X[HOSPITALS == "Mercy", 1:2].tolist()


def test_numbers_of_clients_become_names_in_their_order() -> None:
    data = ClientData.from_arrays(X, Y, by=np.arange(ROWS) % 12)
    assert data.names == tuple(str(client) for client in range(12))


@pytest.mark.parametrize("torch_arrays", [False, True])
def test_arrays_and_tensors_give_the_same(torch_arrays: bool) -> None:
    x, y = (torch.from_numpy(X), torch.from_numpy(Y)) if torch_arrays else (X.astype(np.float64), Y)
    data = ClientData.from_arrays(x, y, by=HOSPITALS)
    assert rows(data, "St Mary") == expected("St Mary")


class Pairs(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(X)[index], int(Y[index])


@pytest.mark.parametrize("in_memory", [None, False])
@pytest.mark.parametrize(
    "dataset",
    [Pairs(), DataLoader(Pairs(), batch_size=7), TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))],
    ids=["dataset", "loader", "tensors"],
)
def test_a_map_style_data_set_gives_the_same(dataset: Any, in_memory: bool | None) -> None:
    data = ClientData.from_dataset(dataset, by=HOSPITALS, in_memory=in_memory)
    assert rows(data, "Charité") == expected("Charité")
    assert data.population(Steps(1, 2)).in_memory == (in_memory is None)


@pytest.mark.parametrize("in_memory", [None, False])
def test_a_hugging_face_data_set_gives_the_same(in_memory: bool | None) -> None:
    import datasets

    hub = datasets.Dataset.from_dict({"values": X.tolist(), "label": Y.tolist(), "site": HOSPITALS.tolist()})
    data = ClientData.from_dataset(hub, by="site", inputs="values", target="label", in_memory=in_memory)
    assert rows(data, "Mercy") == expected("Mercy")
    by_name = ClientData.from_dataset(hub, by="site", target="label", in_memory=in_memory)
    assert list(by_name.examples("Mercy").inputs) == ["values"]


def test_a_dictionary_and_a_function_give_the_same() -> None:
    parts = {name: (X[name == HOSPITALS], Y[name == HOSPITALS]) for name in ("Mercy", "St Mary")}
    frames = {name: frame("polars").filter(name == HOSPITALS).drop("hospital") for name in parts}
    for data in (
        ClientData.from_dict(parts),
        ClientData.from_dict(frames, target="died"),
        client_data(parts),
        ClientData.from_function(parts.__getitem__, parts),
        client_data(parts.__getitem__),
    ):
        assert rows(data, "Mercy") == expected("Mercy")


def test_a_function_is_called_for_one_client_only() -> None:
    asked = []

    def load(name: str) -> tuple[Any, Any]:
        asked.append(name)
        return X[name == HOSPITALS], Y[name == HOSPITALS]

    data = ClientData.from_function(load)
    assert data.names is None
    data.examples("Mercy")
    assert asked == ["Mercy"]
    with pytest.raises(InputError, match="names of the clients are not known: give them"):
        data.population(Steps(1, 1))


def runs(data: ClientData, engine: Any = Sequential, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    problem = Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
    population = data.population(Epochs(1, 4))
    steps = train(
        FedOpt(0.1, 1.0), engine(problem, population, **options), dispatch=Asynchronous(2), buffer=2, rounds=3
    )
    model: torch.Tensor = list(steps)[-1].state.x
    return model


def mapped(folder: Path) -> tuple[Any, Any]:
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", Y)
    return np.load(folder / "x.npy", mmap_mode="r"), np.load(folder / "y.npy", mmap_mode="r")


def sources(folder: Path) -> dict[str, ClientData]:
    x, y = mapped(folder)
    parts = {name: (X[name == HOSPITALS], Y[name == HOSPITALS]) for name in sorted(set(HOSPITALS))}
    return {
        "memory": ClientData.from_arrays(X, Y, by=HOSPITALS),
        "dictionary": ClientData.from_dict(parts),
        "mapped": ClientData.from_arrays(x, y, by=HOSPITALS),
        "dataset": ClientData.from_dataset(Pairs(), by=HOSPITALS, in_memory=False),
        "function": ClientData.from_function(parts.__getitem__, parts),
        "small cache": ClientData.from_function(parts.__getitem__, parts, cache_bytes=1),
    }


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_training_gives_the_same_bits_wherever_the_examples_are(tmp_path: Path, engine: Any) -> None:
    found = {name: runs(data, engine) for name, data in sources(tmp_path).items()}
    for name, model in found.items():
        assert torch.equal(model, found["memory"]), name


@pytest.mark.slow
def test_worker_processes_read_examples_by_themselves(tmp_path: Path) -> None:
    kinds = sources(tmp_path)
    reference = runs(kinds["memory"])
    for name in ("mapped", "function"):
        torch.testing.assert_close(runs(kinds[name], Workers, workers=2), reference, rtol=1e-5, atol=1e-6)


def test_a_mapped_array_is_pickled_by_its_file_and_not_by_its_content(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((50_000, 8), np.float32))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    y = np.arange(40_000) % 2
    source = read_examples((x[10_000:], y))
    stored = pickle.dumps(source)
    assert len(stored) < y.nbytes + 2_000
    again = pickle.loads(stored)
    assert again.arrays.inputs.offset == x.offset + 10_000 * 32
    assert again.gather(np.array([3, 0])).inputs.shape == (2, 8)


def test_a_cache_is_bounded_and_drops_the_least_recently_used_client() -> None:
    loaded = []

    def load(name: str) -> tuple[Any, Any]:
        loaded.append(name)
        return np.zeros((10, 100), np.float32), np.zeros(10, np.int64)

    one = 10 * 100 * 4 + 10 * 8
    population = ClientData.from_function(load, "abcd", cache_bytes=2 * one).population(Steps(1, 1))
    cache: Any = population.data
    for client in (0, 1, 0, 2, 0):
        population.data.gather(population.parts[client][:1])
        assert cache.nbytes <= 2 * one
    assert loaded == ["a", "b", "c"]
    population.data.gather(population.parts[1][:1])
    assert loaded == ["a", "b", "c", "b"]


def test_examples_of_several_clients_come_in_the_order_of_their_indices() -> None:
    parts = {name: (X[name == HOSPITALS], Y[name == HOSPITALS]) for name in sorted(set(HOSPITALS))}
    population = ClientData.from_function(parts.__getitem__, parts).population(Steps(1, 1))
    first, second = population.parts[0], population.parts[2]
    gathered = population.data.gather(np.array([second[1], first[0], second[0]]))
    names = sorted(set(HOSPITALS))
    wanted = [parts[names[2]][0][1], parts[names[0]][0][0], parts[names[2]][0][0]]
    assert gathered.inputs.tolist() == np.array(wanted).tolist()


@pytest.mark.parametrize("kind", ["memory", "function"])
def test_a_split_divides_the_examples_of_each_client(tmp_path: Path, kind: str) -> None:
    data = sources(tmp_path)[kind]
    train_data, test_data = data.split(test=0.25, seed=1)
    for name in sorted(set(HOSPITALS)):
        one, two, whole = (rows(each, name) for each in (train_data, test_data, data))
        assert (len(one), len(two)) == (15, 5)
        assert sorted(one + two) == sorted(whole)
    again = sources(tmp_path)["memory"].split(test=0.25, seed=1)
    assert [rows(each, "Mercy") for each in again] == [rows(train_data, "Mercy"), rows(test_data, "Mercy")]
    assert rows(data.split(test=0.25, seed=2)[1], "Mercy") != rows(test_data, "Mercy")


def test_a_client_with_one_example_trains_on_it() -> None:
    train_data, test_data = ClientData.from_dict({"a": (X[:1], Y[:1]), "b": (X, Y)}).split()
    assert (train_data.examples("a").total, test_data.examples("a").total) == (1, 0)


def test_a_partition_divides_data_that_have_no_clients(tmp_path: Path) -> None:
    kinds = [(X, Y), mapped(tmp_path), Pairs()]
    every = [ClientData.from_partition(data, "dirichlet:0.5", 4, seed=3) for data in kinds]
    assert every[0].names == ("0", "1", "2", "3")
    for name in every[0].names:
        assert rows(every[0], name) == rows(every[1], name) == rows(every[2], name)
    assert labels_of(Examples(torch.zeros(3), torch.zeros(3))).tolist() == [0, 0, 0]


def test_integers_become_long_bytes_stay_and_floats_get_the_default_type() -> None:
    arrays = {
        "ids": np.arange(4, dtype=np.int32),
        "pixels": np.zeros((4, 2), np.uint8),
        "h": np.ones(4, np.float16),
    }
    examples = read_examples((arrays, np.array([True, False, True, False])), in_memory=True)
    kinds = {name: leaf.dtype for name, leaf in examples.inputs.items()}
    assert kinds == {"ids": torch.int64, "pixels": torch.uint8, "h": torch.float32}
    assert examples.targets.dtype == torch.bool


def bad_frame(**changes: Any) -> Any:
    import pandas

    return pandas.DataFrame(columns() | changes)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: ClientData.from_frame(bad_frame(), by="clinic", target="died"),
            "no column 'clinic': its columns are age",
        ),
        (lambda: ClientData.from_frame(bad_frame(), by="hospital", target="dead"), "no column 'dead'"),
        (
            lambda: ClientData.from_frame(X, by="hospital", target="died"),
            "is a ndarray: give a pandas or polars frame",
        ),
        (
            lambda: ClientData.from_frame(bad_frame(bp=["x"] * ROWS), by="hospital", target="died"),
            "column 'bp' has values that are not numbers",
        ),
        (
            lambda: ClientData.from_frame(bad_frame(bp=[np.nan, *X[1:, 1]]), by="hospital", target="died"),
            "column 'bp' has missing values: fill",
        ),
        (
            lambda: ClientData.from_frame(
                bad_frame(hospital=[None, *HOSPITALS[1:]]), by="hospital", target="died"
            ),
            "the column 'hospital' has missing values: give the client of each",
        ),
        (
            lambda: ClientData.from_frame(bad_frame().head(0), by="hospital", target="died"),
            "the data has no rows",
        ),
        (lambda: ClientData.from_arrays(X, Y, by=HOSPITALS[:-1]), "by has 59 values for 60 examples"),
        (lambda: ClientData.from_arrays(X, Y[:-1], by=HOSPITALS), "disagree on the number of examples"),
        (lambda: ClientData.from_arrays(X, ["yes"] * ROWS, by=HOSPITALS), "has a str in it: give arrays"),
        (lambda: ClientData.from_dataset(Pairs(), by="site"), "a torch data set has no columns"),
        (lambda: ClientData.from_dataset(Stream(), by=HOSPITALS), "is a Stream: give a pair of arrays"),
        (lambda: ClientData.from_dict({}), "there are no clients"),
        (lambda: ClientData.from_dict({1: (X, Y), "1": (X, Y)}), "two clients named '1'"),
        (lambda: ClientData.from_dict({"a": (X, Y)}).examples("b"), "unknown client 'b'"),
        (
            lambda: ClientData.from_dict({"a": (X, Y), "b": (X[:0], Y[:0])}).population(Steps(1, 1)),
            "client 'b' has no examples: leave it out",
        ),
        (
            lambda: ClientData.from_dict({"a": (X, Y), "b": (X[:, :1], Y)}).population(Steps(1, 1)),
            "the examples of the clients differ in shape or type",
        ),
        (
            lambda: ClientData.from_function(lambda name: 1 / 0, ["a"]).examples("a"),
            "the data of client 'a' could not be read: ZeroDivisionError: division by zero",
        ),
        (
            lambda: (
                ClientData.from_function(lambda name: (X[:0], Y[:0]), ["a"]).population(Steps(1, 1)).parts[0]
            ),
            "client 'a' has no examples",
        ),
        (
            lambda: ClientData.from_arrays(X, Y, by=HOSPITALS).split(test=1.0),
            "fraction of test examples is 1.0",
        ),
        (lambda: client_data((X, Y)), "does not say which client has which examples"),
        (lambda: read_examples((X, Y, Y)), "has 3 parts: give a pair"),
        (lambda: read_examples(bad_frame()), "name the column to predict, as in target='label'"),
        (lambda: read_examples("digits"), "is a str: give a pair of arrays"),
    ],
)
def test_bad_data_is_refused_in_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_bad_hugging_face_data_are_refused_in_one_sentence() -> None:
    import datasets

    hub = datasets.Dataset.from_dict({"ids": [[1, 2], [3]], "label": [0, 1], "site": ["a", "b"]})
    with pytest.raises(InputError, match="column 'ids' has rows of different shapes"):
        ClientData.from_dataset(hub, by="site", inputs="ids", target="label")
    with pytest.raises(InputError, match="no column 'place': its columns are ids, label, site"):
        ClientData.from_dataset(hub, by="place", inputs="ids", target="label")
    with pytest.raises(InputError, match=r"several splits \('train'\): choose one"):
        read_examples(datasets.DatasetDict({"train": hub}))
    with pytest.raises(InputError, match="name its target column"):
        read_examples(hub)
