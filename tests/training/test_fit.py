"""Which methods read the end of a run."""

import pytest

from offbeat.algorithms import CATALOGUE
from offbeat.errors import InputError
from offbeat.training.loop import check_extendable

READING = {"adamasfl", "masfl", "padamfed", "padamfed-vr"}  # rates from S, K and T
GIVEN = {"local_lr": 0.1, "server_lr": 0.1, "beta": 0.1}


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_a_later_end_is_refused_for_methods_whose_rates_follow_from_it(name: str) -> None:
    check_extendable(name, {}, 20, 20)
    if name not in READING:
        check_extendable(name, {}, 20, 40)
        return
    with pytest.raises(InputError, match="sets its rates by rounds, so 40 in place of 20 is another run"):
        check_extendable(name, {}, 20, 40)
    check_extendable(name, GIVEN, 20, 40)
