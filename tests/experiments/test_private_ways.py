"""The tables of private training are those of its records, and its settings can be built."""

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
