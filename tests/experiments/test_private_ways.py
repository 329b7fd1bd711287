"""The tables of private training are those of its records, and its settings can be built."""

import json
from statistics import mean

import pytest
from experiments.private import ways


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
