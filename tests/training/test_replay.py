import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat import (
    Asynchronous,
    Cycle,
    Dropout,
    Epochs,
    Equal,
    Exponential,
    InputError,
    Poisson,
    Polynomial,
    Population,
    Problem,
    Sequential,
    Setting,
    Steps,
    Synchronous,
    Vectorised,
    build,
)
from offbeat.aggregate.mean import Aggregator, Mean
from offbeat.aggregate.private import Private
from offbeat.aggregate.secure import Secure
from offbeat.algorithms import find
from offbeat.core import AnyAlgorithm
from offbeat.schedule.dispatch import Dispatch, Phases, Queues
from offbeat.schedule.participation import Participation
from offbeat.schedule.staleness import StalenessWeights
from offbeat.training.loop import Snapshot, train
from offbeat.training.replay import TraceSource, read_trace, read_trace_lines, replay
from oracle_replay import Settings, oracle_replay
from worlds import SEED, World, each, make_world

RATES = {"local_lr": 0.2, "server_lr": 0.5}
ADAPTIVE = {"local_lr": 0.2, "server_lr": 0.03}
METHODS: dict[str, dict[str, Any]] = {
    "fedbuff": RATES,
    "fadas-da": ADAPTIVE,
    "adamasfl": {},
    "cadence": {},
    "padamfed-vr": {},
    "scaffold": {},
    "ca2fl": {},
    "dude": {},
    "masfl": {"local_lr": 0.2, "server_lr": 0.3, "beta": 0.4},
    "ma-fedadam": ADAPTIVE | {"span": 5},
}
ROUNDS, BUFFER = 12, 3


def lines(shots: list[Snapshot]) -> list[dict[str, Any]]:
    """What a run's folder keeps of these, as it is read back."""
    written = []
    for shot in shots:
        if shot.filled is None:
            continue
        tasks, started, arrived = shot.filled.tasks, shot.filled.started, shot.filled.arrived
        line = {
            "version": shot.version,
            "time": shot.time,
            "tasks": [[*task, a, b] for task, a, b in zip(tasks, started, arrived, strict=True)],
            "dropped": shot.filled.dropped,
            "lost": shot.filled.lost,
        }
        written.append(json.loads(json.dumps(line)))
    return written


def small(world: World) -> World:
    """The same in float32."""
    module = copy.deepcopy(world.problem.module(world.problem.initial()[0])).float()
    return world._replace(problem=Problem(module, each), population=world.population.to(dtype=torch.float32))


class Played:
    """A run and all that a replay of it is given."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        engine: Any,
        dispatch: Dispatch,
        weights: StalenessWeights = Equal(),
        limit: float = math.inf,
        aggregate: Aggregator = Mean(),
        rounds: int = ROUNDS,
        buffer: int = BUFFER,
    ) -> None:
        self.algorithm, self.engine = algorithm, engine
        self.how: dict[str, Any] = {
            "dispatch": dispatch,
            "buffer": buffer,
            "rounds": rounds,
            "weights": weights,
            "max_staleness": limit,
            "aggregate": aggregate,
            "seed": SEED,
        }
        self.shots = list(train(algorithm, engine, **self.how))
        self.trace = lines(self.shots)

    def again(self, engine: Any = None, **other: Any) -> list[Snapshot]:
        return list(replay(self.algorithm, engine or self.engine, self.trace, **self.how | other))


def made(method: str) -> AnyAlgorithm:
    return build(method, Setting(BUFFER, 3, ROUNDS), METHODS[method])


def played(method: str, world: World, weights: StalenessWeights = Equal()) -> Played:
    """Clients drop out, come and go, and come too late."""
    engine = Sequential(world.problem, world.population, Exponential(1.0), Cycle(5.0, 0.6), Dropout(0.2))
    return Played(made(method), engine, Asynchronous(6), weights, limit=2, rounds=ROUNDS)


@pytest.mark.parametrize("method", METHODS)
def test_a_sequential_run_is_replayed_bit_for_bit(method: str) -> None:
    first = played(method, small(make_world()))
    second = first.again(Sequential(first.engine.problem, first.engine.population))
    assert first.shots[-1].counts.dropped > 0
    assert first.shots[-1].counts.lost > 0
    assert [shot.version for shot in second] == list(range(ROUNDS + 1))
    for a, b in zip(first.shots, second, strict=True):
        assert torch.equal(a.x, b.x)
        assert a.time == b.time
        assert a.filled == b.filled
        assert a.cohort == b.cohort
    assert not torch.equal(first.shots[-1].x, first.shots[0].x)


@pytest.mark.parametrize("method", METHODS)
def test_another_engine_replays_a_run_to_rounding(method: str) -> None:
    first = played(method, small(make_world()))
    last = first.again(Vectorised(first.engine.problem, first.engine.population))[-1].x
    assert (last - first.shots[-1].x).norm() <= 1e-5 * first.shots[-1].x.norm()


@pytest.mark.parametrize(
    ("method", "dispatch"),
    [
        ("fedavg", Synchronous(BUFFER)),
        ("fedbuff", Poisson(0.4)),
        ("defedavg", Queues(6)),
        ("adamasfl", Asynchronous(8)),
        ("mime", Phases(BUFFER)),
    ],
)
def test_every_dispatch_can_be_replayed(method: str, dispatch: Dispatch) -> None:
    world = make_world(work=Epochs(1, 4))
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    first = Played(build(method, Setting(BUFFER, 3, ROUNDS), {}), engine, dispatch)
    for a, b in zip(first.shots, first.again(), strict=True):
        assert torch.equal(a.x, b.x)


def test_a_client_that_was_twice_in_a_buffer_sees_what_it_left_at_first() -> None:
    world = make_world(clients=4)
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    first = Played(made("adamasfl"), engine, Asynchronous(4), rounds=20)
    buffers = [[task[0] for task in line["tasks"]] for line in first.trace[1:]]
    assert any(len(set(clients)) < len(clients) for clients in buffers)
    assert torch.equal(first.again()[-1].x, first.shots[-1].x)


def test_a_start_in_several_pieces_is_replayed_bit_for_bit() -> None:
    world = small(make_world(clients=45))
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    first = Played(made("adamasfl"), engine, Asynchronous(8))
    pieces: list[int] = []
    shots = first.again(observe_start=lambda starting: pieces.append(starting.done))
    assert len(pieces) > 1
    assert torch.equal(shots[-1].x, first.shots[-1].x)


def test_running_statistics_and_layers_that_draw_are_replayed_too() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3)).double()
    world = make_world(module=module, work=Steps(2, 4))
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    first = Played(made("fedbuff"), engine, Asynchronous(5), Polynomial(0.5))
    last = first.again()[-1]
    assert torch.equal(last.x, first.shots[-1].x)
    assert last.statistics.keys() == first.shots[-1].statistics.keys()
    assert all(
        torch.equal(last.statistics[name], value) for name, value in first.shots[-1].statistics.items()
    )


def test_a_replay_ends_where_it_is_told_to_and_reads_no_further() -> None:
    first = played("adamasfl", make_world())
    first.trace[6] = {"version": "damaged"}
    shots = first.again(until=5)
    assert [shot.version for shot in shots] == list(range(6))
    assert torch.equal(shots[-1].x, first.shots[5].x)
    assert [shot.version for shot in first.again(until=0)] == [0]
    with pytest.raises(InputError, match="line 7 of the trace has no version"):
        first.again(until=6)


def test_a_run_that_was_cut_off_is_replayed_as_far_as_it_went() -> None:
    first = played("ma-fedadam", make_world())
    del first.trace[7:]
    shots = first.again()
    assert [shot.version for shot in shots] == list(range(8))
    assert torch.equal(shots[-1].x, first.shots[7].x)
    with pytest.raises(InputError, match="ends at version 7: replay up to there at most"):
        first.again(until=8)


@pytest.mark.parametrize("noisy", [0.0, 0.5])
def test_a_private_run_is_replayed_where_its_noise_can_be_drawn_again(noisy: float) -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    private = Private.of(
        made("fedbuff"), 0.3, noisy, 1e-5, participation=Participation(ROUNDS, 1), noise_seed=3
    )
    first = Played(made("fedbuff"), engine, Asynchronous(5), aggregate=private)
    assert torch.equal(first.again()[-1].x, first.shots[-1].x)


def test_a_private_run_whose_noise_is_secret_is_refused() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    private = Private.of(made("fedbuff"), 0.3, 0.5, 1e-5, participation=Participation(ROUNDS, 1))
    first = Played(made("fedbuff"), engine, Asynchronous(5), aggregate=private)
    with pytest.raises(InputError, match="the noise of this run is secret and drawn only once"):
        first.again()


def test_sums_in_secret_are_replayed() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    first = Played(made("fedbuff"), engine, Asynchronous(6), aggregate=Mean(Secure(minimum=2)), buffer=4)
    assert torch.equal(first.again()[-1].x, first.shots[-1].x)


def test_messages_are_held_as_long_as_somebody_needs_them_and_no_longer() -> None:
    first = played("fedbuff", make_world())
    opened = []

    class Watched(Sequential):
        def open(self, *given: Any) -> Any:
            opened.append(super().open(*given))
            return opened[0]

    engine = Watched(first.engine.problem, first.engine.population)
    for shot in replay(first.algorithm, engine, first.trace, **first.how):
        later = [line for line in first.trace if line["version"] > shot.version]
        tasks = [task for line in later for name in ("tasks", "dropped", "lost") for task in line[name]]
        needed = {task[1] for task in tasks if task[1] < shot.version}
        if shot.version:
            assert opened[0]._messages.keys() == needed | {shot.version - 1}
        assert shot.counts.in_flight == sum(task[1] < shot.version for task in tasks)
        assert opened[0].busy == 0


def test_a_replay_has_no_checkpoint() -> None:
    first = played("fedbuff", make_world())
    shots = replay(first.algorithm, first.engine, first.trace, **first.how)
    next(shots)
    with pytest.raises(InputError, match="a replay has no checkpoints"):
        next(shots).checkpoint()
    shots.close()
    with pytest.raises(InputError, match="begins at version 0"):
        TraceSource(None, [], first.engine.open(first.algorithm, 0, first.how["dispatch"].source(0))).load({})


@pytest.fixture(scope="module")
def whole() -> Played:
    return played("adamasfl", make_world())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda trace: trace[3].pop("tasks"), "line 4 of the trace has no list of tasks"),
        (lambda trace: trace.pop(3), "line 4 of the trace is of version 4 where 3 comes next"),
        (lambda trace: trace.insert(3, trace[2]), "line 4 of the trace is of version 2 where 3 comes next"),
        (lambda trace: trace.insert(0, trace[0]), "line 2 of the trace is of version 0 where 1 comes next"),
        (lambda trace: trace[3]["tasks"].pop(), "line 4 of the trace has 2 tasks in place of 3"),
        (lambda trace: trace[0]["tasks"].pop(), "line 1 of the trace has 7 tasks in place of 8"),
        (lambda trace: change(trace, 3, 0, 8), "line 4 of the trace has a client 8, outside 0..7"),
        (lambda trace: change(trace, 3, 1, 3), "line 4 of the trace has a task of version 3, which was not"),
        (lambda trace: change(trace, 9, 1, 2), "line 10 of the trace uses an update that is 6 versions old"),
        (lambda trace: change(trace, 3, 2, 0), "line 4 of the trace has visit 0 of client . a second time"),
        (
            lambda trace: change(trace, 3, 2, 99),
            "line [0-9]+ of the trace has visit [0-9]+ of client . after",
        ),
        (
            lambda trace: change(trace, 3, 2, -1),
            "line 4 of the trace has something among its tasks that is not",
        ),
        (lambda trace: change(trace, 3, 2, True), "line 4 of the trace has something among its tasks"),
        (lambda trace: change(trace, 3, 4, math.nan), "line 4 of the trace has something among its tasks"),
        (lambda trace: change(trace, 3, 2, 2**40), "line 4 of the trace has something among its tasks"),
        (
            lambda trace: trace[3]["tasks"][0].append(1),
            "line 4 of the trace has a task with too few or too many",
        ),
        (
            lambda trace: trace[3].update(lost=[[1, 2]]),
            "line 4 of the trace has a task with too few or too many",
        ),
        (lambda trace: trace[3].update(time=None), "line 4 of the trace has no version, or no time"),
        (lambda trace: trace.__setitem__(3, [1]), "line 4 of the trace is not an object"),
        (lambda trace: trace.pop(0), "this trace has no start of all clients and AdaMasFL has one"),
    ],
)
def test_what_cannot_have_happened_is_refused_with_its_line(whole: Played, spoil: Any, says: str) -> None:
    trace = copy.deepcopy(whole.trace)
    spoil(trace)
    shots = replay(whole.algorithm, whole.engine, trace, **whole.how)
    with pytest.raises(InputError, match=says):
        next(shots)


def change(trace: list[dict[str, Any]], line: int, place: int, value: object) -> None:
    trace[line]["tasks"][0][place] = value


def test_a_start_that_the_method_does_not_have_is_refused(whole: Played) -> None:
    with pytest.raises(InputError, match="this trace has a start of all clients and FedOpt has none"):
        next(replay(made("fedbuff"), whole.engine, whole.trace, **whole.how))


@pytest.mark.parametrize("steps", [[0] * BUFFER, [True] * BUFFER, [1.5] * BUFFER, [2**70] * BUFFER, [3], "3"])
def test_steps_that_tasks_cannot_have_done_are_refused_with_their_line(whole: Played, steps: object) -> None:
    trace = copy.deepcopy(whole.trace)
    trace[2]["steps"] = [3, None, 1]
    assert read_trace(trace, 8, BUFFER, 2, None)[1][1].steps == (3, None, 1)
    trace[2]["steps"] = steps
    with pytest.raises(InputError, match="line 3 of the trace has steps that are not those of its tasks"):
        read_trace(trace, 8, BUFFER, 2, None)


@given(st.data())
def test_a_damaged_trace_is_read_or_refused_and_nothing_else(whole: Played, data: st.DataObject) -> None:
    """Whatever a value is replaced by, either an `InputError` names a line, or it did no harm."""
    trace = copy.deepcopy(whole.trace)
    number = data.draw(st.integers(0, len(trace) - 1))
    value = data.draw(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(0, 9))
    )
    name = data.draw(st.sampled_from(["version", "time", "tasks", "dropped", "lost"]))
    if name in ("tasks", "dropped", "lost") and trace[number][name] and data.draw(st.booleans()):
        row = data.draw(st.sampled_from(trace[number][name]))
        row[data.draw(st.integers(0, len(row) - 1))] = value
    else:
        trace[number][name] = value
    try:
        start, taken = read_trace(trace, 8, BUFFER, 2, None)
    except InputError as error:
        refused, start, taken = str(error), None, []
    else:
        refused = ""
    if start is None:
        assert refused.startswith("line ")
    else:
        assert [filled.version for filled in taken] == list(range(ROUNDS))
        visits = [(c, n) for filled in (start, *taken) for c, _, n in filled.tasks]
        assert len(set(visits)) == len(visits)


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path, whole: Played) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in whole.trace) + '{"version": 13, "ta')
    assert list(read_trace_lines(path)) == whole.trace
    path.write_text('{"version": 0}\n{"version": 1,\n{}\n')
    with pytest.raises(InputError, match="line 2 of the trace is not JSON: replay an undamaged copy"):
        list(read_trace_lines(path))


CASES = {
    "fedbuff": (RATES, Equal()),
    "fedbuff fading": (RATES, Polynomial(0.5)),
    "fadas": (ADAPTIVE, Equal()),
    "fadas-da": (ADAPTIVE, Equal()),
    "adamasfl": ({}, Equal()),
    "ma-fedavgm": (RATES, Equal()),
    "ma-fedadam": (ADAPTIVE, Polynomial(0.5)),
    "ma-light-fedavgm": (RATES, Equal()),
}


@pytest.mark.parametrize("work", [Steps(3, 4), Epochs(1, 4)])
@pytest.mark.parametrize("case", CASES)
def test_a_trace_through_the_oracle_gives_the_replayed_model(case: str, work: Steps | Epochs) -> None:
    """The data are each client's own, as a site has them; the run had them in one pile."""
    rates, weights = CASES[case]
    method = case.removesuffix(" fading")
    world = make_world(work=work)
    algorithm = build(method, Setting(BUFFER, 3, ROUNDS), rates)
    engine = Sequential(world.problem, world.population, Exponential(1.0), Cycle(5.0, 0.6), Dropout(0.2))
    first = Played(algorithm, engine, Asynchronous(6), weights, limit=3)
    population = world.population
    data = [
        (population.data.inputs[part].numpy(), population.data.targets[part].numpy())
        for part in (torch.from_numpy(np.asarray(population.parts[client])) for client in range(8))
    ]
    known = known_of(method, algorithm, rates)
    settings = Settings(method, known, first.shots[0].x.numpy(), work, SEED, str(weights))
    model = oracle_replay(first.trace, data, settings)
    again = first.again(Vectorised(world.problem, own(data, work)))[-1].x.numpy()
    np.testing.assert_allclose(again, model, rtol=0, atol=1e-10)
    np.testing.assert_allclose(first.shots[-1].x.numpy(), model, rtol=0, atol=1e-10)
    assert np.abs(model - settings.x0).max() > 1e-3


def known_of(method: str, algorithm: AnyAlgorithm, rates: dict[str, Any]) -> dict[str, Any]:
    """Every hyperparameter, as `trial.resolved` writes them into a run's settings."""
    known = {name: rates.get(name, each.default) for name, each in find(method).parameters().items()}
    return {name: getattr(algorithm, name, None) if value is None else value for name, value in known.items()}


def own(data: list[tuple[np.ndarray, np.ndarray]], work: Steps | Epochs) -> Population:
    """A population whose clients' examples lie one after another."""
    ends = np.cumsum([len(labels) for _, labels in data])
    inputs, labels = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*data, strict=True))
    return Population((inputs, labels), np.split(np.arange(ends[-1]), ends[:-1]), work)


@pytest.mark.parametrize(("visit", "refused"), [(2**32 - 1, False), (2**32, True)])
def test_numbers_of_a_trace_are_below_what_a_run_can_count(visit: int, refused: bool) -> None:
    line = {"version": 1, "time": 1.0, "tasks": [[0, 0, visit, 0.0, 1.0]], "dropped": [], "lost": []}
    if refused:
        with pytest.raises(InputError, match="not a task"):
            read_trace([line], 1, 1, math.inf, None)
    else:
        assert read_trace([line], 1, 1, math.inf, None)[1][0].tasks[0].visit == visit
