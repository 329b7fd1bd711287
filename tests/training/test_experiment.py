import dataclasses
import json

import pytest
import torch

from offbeat.algorithms import CATALOGUE, Setting
from offbeat.engines.simulation import Sequential, Vectorised
from offbeat.errors import InputError
from offbeat.training.build import build_run, resolved_settings
from offbeat.training.experiment import Experiment


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_method_comes_with_its_own_protocol(name):
    entry = CATALOGUE[name]
    experiment = Experiment.of(algorithm=name, rounds=100)
    assert experiment.dispatch == entry.dispatch
    assert experiment.weights == entry.weights
    assert experiment.buffer == (entry.buffer or 10)
    assert experiment.eval_every == 5


def test_what_was_given_wins_over_the_protocol():
    experiment = Experiment.of(
        algorithm="fedavg", dispatch="round-refill", buffer=4, eval_every=7, model="logistic"
    )
    assert (experiment.dispatch, experiment.buffer, experiment.eval_every, experiment.model) == (
        "round-refill",
        4,
        7,
        "logistic",
    )


def test_settings_survive_a_file():
    experiment = Experiment.of(
        algorithm="adamasfl", parameters=(("beta", 0.5), ("local_lr", 0.01)), max_staleness=3, ema_decay=0.9
    )
    assert Experiment.from_settings(json.loads(json.dumps(experiment.settings()))) == experiment


@pytest.mark.parametrize("settings", [{}, {"parameters": []}])
def test_settings_that_are_not_of_a_run_are_refused(settings):
    with pytest.raises(InputError, match="these are not the settings of a run"):
        Experiment.from_settings(settings)


@pytest.mark.parametrize(
    "field",
    [field for field in dataclasses.fields(Experiment) if field.name != "parameters"],
    ids=lambda field: field.name,
)
def test_a_setting_of_the_wrong_type_is_named(field):
    kinds = {"str": {str}, "int": {int}, "float": {int, float}, "bool": {bool}, "None": {type(None)}}
    told = getattr(field.type, "__name__", str(field.type))  # as in "int | None"
    fits = set.union(*(kinds[word] for word in told.split(" | ")))
    wrong = [value for value in (None, True, 1, 1.5, "many", [], {}) if type(value) not in fits]
    if field.name == "task":
        wrong.remove({})  # a table, as the settings of a deployment have it
    assert len(wrong) >= 3
    for value in wrong:
        with pytest.raises(InputError, match=rf"are damaged \({field.name} is "):
            Experiment.from_settings(Experiment.of().settings() | {field.name: value})


@pytest.mark.parametrize(
    "name",
    ["clients", "concurrency", "buffer", "local_steps", "local_epochs", "batch_size", "rounds", "eval_every"],
)
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_a_count_out_of_range_is_refused(name, value):
    with pytest.raises(InputError, match=f"{name} must be at least 1 and below 2\\^31"):
        dataclasses.replace(Experiment(), **{name: value})


def test_a_folder_for_data_that_needs_none_is_refused():
    with pytest.raises(InputError, match="digits ships with scikit-learn and needs no data_dir"):
        Experiment.of(data="digits", data_dir="somewhere")
    assert Experiment.of(data="mnist", data_dir="somewhere").data_dir == "somewhere"


def test_the_engine_follows_the_size_of_the_model_unless_named():
    small = Experiment.of(clients=12, buffer=3, concurrency=5)
    assert isinstance(build_run(small).engine, Vectorised)
    assert isinstance(build_run(dataclasses.replace(small, engine="sequential")).engine, Sequential)


def test_a_second_trial_may_share_the_data_of_the_first():
    one = build_run(Experiment.of(clients=12, buffer=3, concurrency=5))
    other = build_run(Experiment.of(algorithm="fedavg", clients=12, buffer=3), one.task)
    assert other.task is one.task
    assert other.engine.population.data.inputs is one.engine.population.data.inputs
    assert torch.equal(other.problem.initial()[0], one.problem.initial()[0])


def test_rates_that_follow_from_the_system_are_resolved():
    small = {"clients": 12, "buffer": 3, "concurrency": 5}
    experiment = Experiment.of(algorithm="adamasfl", parameters=(("beta", 0.25),), **small)
    trial = build_run(experiment)
    values = resolved_settings(experiment, trial)
    assert values["hyperparameters"] == {
        "local_lr": trial.algorithm.local_lr,
        "server_lr": trial.algorithm.server_lr,
        "beta": 0.25,
        "lazy": False,
    }
    assert values["model_size"] == 64 * 64 + 64 + 64 * 10 + 10
    assert values["engine"] == "vectorised"
    plain = Experiment.of(algorithm="fedadam", clients=12, buffer=3)
    assert resolved_settings(plain, build_run(plain))["hyperparameters"]["eps"] == 1e-3


def test_epochs_count_as_their_mean_number_of_minibatches_over_clients():
    small = {"clients": 12, "buffer": 3, "concurrency": 5}
    experiment = Experiment.of(algorithm="adamasfl", local_epochs=2, batch_size=7, **small)
    trial = build_run(experiment)
    sizes = [trial.engine.population.size(client) for client in range(12)]
    steps = round(sum(2 * -(-size // 7) for size in sizes) / 12)
    assert trial.algorithm.local_lr == pytest.approx(1 / (steps * experiment.rounds**0.5))  # Theorem 2


def test_the_method_that_nobody_names_needs_no_rate_and_no_bound():
    own = Experiment.of(**HIDING)
    assert (own.algorithm, own.clip) == ("cadence", "descent=1")
    assert dict(own.parameters) == {"variates": False, "noisy": True}
    assert own.dispatch == "asynchronous"


HIDING = {"noise": 1.0, "delta": 1e-6, "max_participations": 5}


def test_a_method_that_bounds_all_it_uploads_sets_the_clip_where_privacy_is_asked_for():
    own = Experiment.of(algorithm="cadence", **HIDING)
    assert own.clip == "descent=1"
    both = Experiment.of(algorithm="cadence", parameters=(("variates", True),), **HIDING)
    assert both.clip == "descent=1,shift=2"
    assert Experiment.of(algorithm="cadence", clip="shift=0.5", **HIDING).clip == "shift=0.5"
    assert Experiment.of(algorithm="cadence", secure=True).clip is None
    assert Experiment.from_settings(json.loads(json.dumps(own.settings()))) == own


def test_a_private_run_takes_the_parameters_that_its_method_has_for_it_unless_they_or_a_clip_were_given():
    cadence = {"algorithm": "cadence"}
    assert dict(Experiment.of(**cadence, **HIDING).parameters) == {"variates": False, "noisy": True}
    for value in (False, True):
        given = Experiment.of(**cadence, **HIDING, parameters=(("variates", value),))
        assert dict(given.parameters) == {"variates": value, "noisy": True}
    clipped = Experiment.of(**cadence, **HIDING, clip="shift=0.5")
    assert dict(clipped.parameters) == {"noisy": True}  # which noise asks for, however it is scaled
    for plain in (cadence, cadence | {"secure": True}):
        assert Experiment.of(**plain).parameters == ()
    other = Experiment.of(algorithm="fedbuff", parameters=(("local_lr", 0.2),), clip="1", **HIDING)
    assert other.parameters == (("local_lr", 0.2),)


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_what_a_method_has_for_private_runs_are_parameters_that_it_takes(name):
    entry = CATALOGUE[name]
    assert entry.build(Setting(1, 1, 1), **dict(entry.private_defaults))
    assert dict(entry.private_defaults).keys() <= entry.parameters().keys()


@pytest.mark.parametrize("name", sorted(CATALOGUE.keys() - {"cadence"}))
def test_a_method_that_leaves_a_field_open_still_asks_for_a_clip(name):
    with pytest.raises(InputError, match="noise needs clip, the most that a client may add to a sum"):
        Experiment.of(algorithm=name, **HIDING)
