"""The tables of private training are those of its records, and its settings can be built."""

import json
from statistics import mean

import pytest
from experiments.private import fedbuff, ways


@pytest.mark.parametrize("data", ways.TASKS)
def test_the_tables_on_the_page_are_those_of_the_records(data: str) -> None:
    page = (ways.HERE / "README.md").read_text()
    shown = page.split(f"<!-- {data} -->")[1].split("<!-- end -->")[0].strip()
    assert shown == (ways.table(data) if data in ways.TABLES else ways.ablation())


@pytest.mark.parametrize("momentum", ways.METHODS)
@pytest.mark.parametrize("data", ways.TASKS)
@pytest.mark.parametrize("way", ways.WAYS)
def test_each_way_has_the_same_clients_and_cohort_and_says_that_it_is_a_simulation(
    data: str, way: str, momentum: str
) -> None:
    made = ways.settings(data, way, momentum, 2.0, 0, "cpu")
    assert made.nominal_cohort == made.buffer * ways.POPULATION // made.clients
    assert (made.dispatch == "allocation") == (way == "timed") == (made.max_participations is None)
    assert made.noise_correlation.startswith({"banded": "banded", "blt": "blt"}.get(way, "independent"))
    assert dict(made.parameters)["server_lr"] == ways.TASKS[data].parameters["server_lr"]


def test_the_table_of_cadence_and_fedbuff_is_that_of_the_records() -> None:
    page = (ways.HERE / "README.md").read_text()
    assert page.split("<!-- fedbuff -->")[1].split("<!-- end -->")[0].strip() == fedbuff.table()


@pytest.mark.parametrize(
    ("data", "way"), [(data, way) for data, some in fedbuff.WAYS.items() for way in some]
)
def test_the_grid_of_fedbuff_goes_on_until_no_neighbour_does_better(data: str, way: str) -> None:
    records = fedbuff.read(data)
    assert fedbuff.next_rates(records, way) == []
    best, found = fedbuff.best_rates(records, way), fedbuff.of_fedbuff(records, way, 0)
    assert all(found[rates] <= found[best] for rates in fedbuff.neighbours(best))
    assert all(best in fedbuff.of_fedbuff(records, way, seed) for seed in ways.SEEDS)
    noise = {each["noise"] for each in records if each["way"] == way}
    assert len(noise) == 1  # the same for both methods and all rates


def test_the_grid_begins_whole_and_then_looks_around_its_best() -> None:
    def ran(accuracy: float, *rates: float) -> dict[str, object]:
        named = dict(zip(("local_lr", "server_lr", "clip"), rates, strict=True))
        return {"way": "timed", "method": "fedbuff", "seed": 0, "accuracy": accuracy, **named}

    whole = [ran(n / 100, *rates) for n, rates in enumerate(fedbuff.GRID)]
    assert fedbuff.next_rates(whole[1:], "timed") == [fedbuff.GRID[0]]
    assert fedbuff.next_rates(whole, "timed") == fedbuff.neighbours((0.8, 2.0, 1.0))
    assert fedbuff.neighbours((1.0, 1.0, 1.0)) == [
        (0.5, 1.0, 1.0),
        (2.0, 1.0, 1.0),
        (1.0, 0.5, 1.0),
        (1.0, 2.0, 1.0),
        (1.0, 1.0, 0.5),
        (1.0, 1.0, 2.0),
    ]


def gains(data: str) -> dict[tuple[str, float, int], float]:
    """What momentum approximation adds by way, epsilon and seed, in points."""
    lines = (ways.HERE / "records" / f"{data}.jsonl").read_text().splitlines()
    found = {ways._key(record): 100 * record["accuracy"] for record in map(json.loads, lines)}
    return {
        (way, epsilon, seed): found[way, "with", epsilon, seed] - value
        for (way, momentum, epsilon, seed), value in found.items()
        if momentum == "without"
    }


def test_what_the_page_says_of_momentum_approximation_holds() -> None:
    lost, gained = gains("shakespeare"), gains("fashion-mnist")
    assert len(lost) == len(gained) == len(ways.WAYS) * len(ways.EPSILONS) * len(ways.SEEDS) == 24
    assert sum(each < 0 for each in lost.values()) == 23
    assert round(mean(lost.values()), 1) == -0.3
    groups = [mean(gained[way, epsilon, seed] for seed in ways.SEEDS) for way, epsilon, _ in gained]
    assert 0.9 < min(groups) < max(groups) < 5.1
