"""What is sent and kept, against the cost table of the algorithms' specification (units of the model)."""

import sys

import pytest
import torch

from offbeat import CATALOGUE, Asynchronous, Dropout, Exponential, Sequential, Setting, Synchronous, build
from offbeat.schedule.dispatch import Phases
from worlds import make_world, play

# down, up; the table's own rows. CA2FL's and DuDe's tables live with the clients here, so a client keeps 1.
TABLE = {
    "fedavg": (1, 1),
    "fedbuff": (1, 1),
    "fedasync": (1, 1),
    "defedavg": (1, 1),
    "defedavg-iid": (1, 1),
    "fadas": (1, 1),
    "fadas-da": (1, 1),
    "fedavgm": (1, 1),
    "fedadam": (1, 1),
    "fedyogi": (1, 1),
    "fedadagrad": (1, 1),
    "fedams": (1, 1),
    "fedsps": (1, 1),
    "scaffold": (2, 2),
    "fedavg-m": (2, 1),
    "fedavg-m-vr": (3, 1),
    "scaffold-m": (2, 1),
    "scaffold-m-vr": (3, 2),
    "masfl": (2, 1),
    "adamasfl": (2, 2),
    "padamfed": (2, 2),
    "padamfed-vr": (3, 3),
    "ca2fl": (1, 1),
    "cadence": (2, 2),
    "dude": (1, 1),
    "mime": (4, 2),
    "mimelite": (2, 2),
    "fafed": (3, 3),
    "ma-fedavgm": (1, 1),
    "ma-fedadam": (1, 1),
    "ma-fedadagrad": (1, 1),
    "ma-fadas": (1, 1),
    "ma-light-fedavgm": (1, 1),
    "ma-light-fedadam": (1, 1),
    "ma-light-fedadagrad": (1, 1),
    "ma-light-fadas": (1, 1),
    "weight-prediction": (2, 1),
}


def test_the_table_knows_every_method() -> None:
    assert TABLE.keys() == CATALOGUE.keys()


@pytest.mark.parametrize("name", CATALOGUE)
def test_what_the_catalogue_says_is_what_a_run_sends(name: str) -> None:
    down, up = TABLE[name]
    vectors = CATALOGUE[name].vectors()
    assert (vectors["down"], vectors["up"]) == (down, up)
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    size = world.problem.size
    dispatch = Phases(3) if name == "mime" else Synchronous(3)
    shot = play(build(name, Setting(3, 3, 4), {}), engine, dispatch, rounds=4)[-1]
    trips = 2 if name == "mime" else 1  # its two trips a round share the cost
    mark = 21 if name.startswith("ma-") else 0  # where an update began, down and up
    rates = 2 if name == "cadence" else 0  # numbers that go down with the vectors
    assert shot.sent.down == shot.counts.started * (down * size + mark + rates) // trips
    assert shot.sent.up == shot.counts.trips * (up * size + mark) // trips


def test_lost_tasks_cost_a_download_and_late_ones_both_ways() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0), dropout=Dropout(0.3))
    shot = play(build("fedbuff", Setting(3, 3, 20), {}), engine, Asynchronous(6), rounds=20, limit=1)[-1]
    assert shot.counts.lost > 0
    assert shot.counts.dropped > 0
    assert shot.sent.down == shot.counts.started * world.problem.size
    assert shot.sent.up == shot.counts.trips * world.problem.size


def test_the_start_is_counted_also_when_it_is_done_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population)
    algorithm = build("adamasfl", Setting(3, 3, 4), {})
    whole = play(algorithm, engine, Asynchronous(5), rounds=2)
    monkeypatch.setattr(sys.modules["offbeat.training.loop"], "_MIN_PIECE", 3)
    pieces = play(algorithm, engine, Asynchronous(5), rounds=2)
    for left, right in zip(whole, pieces, strict=True):
        assert left.sent == right.sent
        torch.testing.assert_close(left.state, right.state, rtol=0, atol=1e-13)
    assert whole[0].sent == (8 * 2 * world.problem.size, 8 * 2 * world.problem.size)
