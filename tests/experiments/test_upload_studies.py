"""The pages on malicious clients, on smaller uploads and on tuning are those of their records."""

import torch
from experiments.attacks import study as attacks
from experiments.compression import study as compression
from experiments.tuning import study as tuning

from offbeat import Asynchronous, Constant, FedOpt, Sequential
from worlds import make_world, play


def test_the_tables_on_the_pages_are_those_of_the_records() -> None:
    assert attacks.PAGE.read_text() == attacks.page()
    assert compression.PAGE.read_text() == compression.page()
    assert tuning.PAGE.read_text() == tuning.page()


def test_every_run_has_one_record() -> None:
    assert sorted(map(str, attacks.runs())) == sorted(
        str(attacks.key(record)) for record in attacks.records()
    )
    runs = [
        (method, compress, seed)
        for seed in compression.SEEDS
        for method in compression.METHODS
        for compress in compression.COMPRESSIONS
    ]
    found = [compression.key(record) for record in compression.records()]
    assert sorted(map(str, runs)) == sorted(map(str, found))


def test_an_attacker_reverses_and_scales_its_update_and_nobody_elses() -> None:
    world = make_world()
    plain = Sequential(world.problem, world.population, Constant(1.0))
    everybody = attacks.AttackedEngine(plain, frozenset(range(8)), -10.0)
    honest, attacked = (
        play(FedOpt(0.1, 1.0), engine, Asynchronous(3), rounds=1) for engine in (plain, everybody)
    )
    step = honest[1].x - honest[0].x
    torch.testing.assert_close(attacked[1].x - attacked[0].x, -10 * step, rtol=0, atol=1e-12)
    assert everybody.session.malicious == everybody.session.used == 3
    nobody = attacks.AttackedEngine(plain, frozenset(), -10.0)
    assert torch.equal(play(FedOpt(0.1, 1.0), nobody, Asynchronous(3), rounds=1)[1].x, honest[1].x)


def test_attackers_are_a_share_of_the_clients_and_fast_ones_answer_at_once() -> None:
    few, more = (attacks.attackers(share, 100, 0) for share in (0.1, 0.2))
    assert len(few) == 10
    assert len(more) == 20
    assert few < more
    rng = Asynchronous(3).source(0)
    delay = attacks.FastAttackers(Constant(7.0), few).bind(rng, 100)
    assert {delay(client, 0, 0.5) for client in few} == {attacks.FAST}
    assert delay(next(iter(more - few)), 0, 0.5) == 7.0


def test_a_killed_study_is_the_one_that_was_not_and_saves_at_the_accuracy_of_the_grid() -> None:
    found = tuning.records()
    seeds = [seed for kind, seed in found if kind == "grid"]
    assert seeds == list(tuning.SEEDS)
    for seed in seeds:
        grid, halving, search = (found[kind, seed] for kind in tuning.STUDIES)
        assert len(grid["trials"]) == 15
        assert all(state != "pruned" for _, state, *_ in grid["trials"])
        assert halving["best"] >= grid["best"]
        assert halving["client_updates"] < grid["client_updates"]
        assert found[tuning.KILLED, seed]["trials"] == search["trials"]
        needed = found[tuning.NEEDED, seed]
        assert needed["best"] >= grid["best"]
        assert needed["trials"] == search["trials"][: len(needed["trials"])]
