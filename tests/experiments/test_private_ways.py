"""The table of private training is that of its records, and its settings can be built."""

import pytest
from experiments.private import ways


def test_the_table_on_the_page_is_that_of_the_records() -> None:
    page = (ways.HERE / "README.md").read_text()
    assert page.split("<!-- digits -->")[1].split("<!-- end -->")[0].strip() == ways.table("digits")


@pytest.mark.parametrize("data", ways.TASKS)
@pytest.mark.parametrize("way", ways.WAYS)
def test_each_way_has_the_same_clients_and_cohort_and_says_that_it_is_a_simulation(
    data: str, way: str
) -> None:
    made = ways.settings(data, way, "with", 2.0, 0, "cpu")
    assert made.nominal_cohort == made.buffer * ways.POPULATION // made.clients
    assert (made.dispatch == "allocation") == (way == "timed") == (made.max_participations is None)
    assert made.noise_correlation.startswith({"banded": "banded", "blt": "blt"}.get(way, "independent"))
