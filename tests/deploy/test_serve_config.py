"""A deployment's settings file: what is read, what is filled in, and what is refused in one sentence."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy_world import site_plan
from offbeat.deploy import config
from offbeat.deploy.config import ServeConfig, simulation_settings, table_keys
from offbeat.errors import InputError
from offbeat.training.experiment import Experiment
from offbeat.training.schema import ValueKind

TASK = {"function": "package.task:task"}
PRIVATE = {"clip": 1.0, "noise": 1.0, "delta": 1e-6, "max_participations": 3}


def plan(**tables: dict[str, Any]) -> ServeConfig:
    training = {"clients": 6} | tables.pop("training", {})
    return ServeConfig.of({"task": TASK, "training": training} | tables, Path("/here"))


def refusal(**tables: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        plan(**tables)
    return str(caught.value)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(
        '[task]\nfunction = "a.b:c"\n'
        '[training]\nalgorithm = "fadas"\nclients = 4\nbuffer = 2\nparameters = {unbiased = true}\n'
        "[network]\ndeadline = 60\n[watch]\nport = 9000\n"
    )
    read = ServeConfig.read(path)
    assert read.folder == tmp_path
    assert read.settings()["task"] == {"function": "a.b:c"}
    assert (read.experiment.algorithm, read.experiment.buffer) == ("fadas", 2)
    assert dict(read.experiment.parameters) == {"unbiased": True}
    assert (read.network.deadline, read.page.port) == (60, 9000)


def test_what_is_left_out_follows_from_the_sites_and_the_method() -> None:
    own = plan().experiment
    assert (own.algorithm, own.concurrency, own.buffer) == (Experiment.algorithm, 6, 3)
    assert plan(training={"algorithm": "fedasync"}).experiment.buffer == 1
    assert plan(training={"clients": 1000}).experiment.buffer == 10


def test_settings_give_the_same_experiment_back_and_tell_a_deployment() -> None:
    made = plan(privacy=PRIVATE, training={"algorithm": "fedbuff", "max_staleness": 4})
    kept = json.loads(json.dumps(made.settings()))
    assert Experiment.from_settings(kept) == made.experiment
    assert kept["task"]["function"] == TASK["function"]
    assert "partition" not in kept


def test_the_note_says_what_a_site_needs() -> None:
    made = plan(
        training={"algorithm": "fedbuff", "buffer": 2, "rounds": 9, "local_steps": 7, "batch_size": 5}
    )
    note = json.loads(json.dumps(made.note({"lr": 0.5})))
    assert note == site_plan(parameters={"lr": 0.5}, setting=[2, 7, 9], work=["steps", 7, 5], clients=6)


def test_epochs_are_counted_in_steps_of_a_site_of_middling_size() -> None:
    made = plan(training={"local_epochs": 2, "examples": 95, "batch_size": 10})
    assert made.steps == 20
    assert made.note({})["work"] == ["epochs", 2, 10]


def test_a_bound_may_be_a_number_a_text_or_a_table() -> None:
    for clip, text in (
        (1.5, "1.5"),
        ("delta=2", "delta=2"),
        ({"delta": 2, "stamp": 0.5}, "delta=2,stamp=0.5"),
    ):
        assert plan(privacy=PRIVATE | {"clip": clip}).experiment.clip == text


def test_a_method_that_bounds_all_it_uploads_needs_no_clip() -> None:
    table = {name: value for name, value in PRIVATE.items() if name != "clip"}
    own = plan(privacy=table, training={"algorithm": "cadence"}).experiment
    assert (dict(own.parameters), own.clip) == ({"variates": False, "noisy": True}, "descent=1")
    both = {"algorithm": "cadence", "parameters": {"variates": True}}
    assert plan(privacy=table, training=both).experiment.clip == "descent=1,shift=2"


def test_a_method_keeps_its_uploads_where_a_clip_is_given_by_field() -> None:
    own = plan(privacy=PRIVATE | {"clip": {"shift": 0.5}}, training={"algorithm": "cadence"}).experiment
    assert (dict(own.parameters), own.clip) == ({"noisy": True}, "shift=0.5")


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"trainig": {}}, "unknown key of the settings 'trainig': did you mean training?"),
        ({"training": {"bufer": 2}}, "unknown key of [training] 'bufer': did you mean buffer?"),
        ({"training": {"buffer": "2"}}, "buffer of [training] must be a whole number, not '2'."),
        ({"training": {"clients": True}}, "clients of [training] must be a whole number, not True."),
        ({"training": {"weight_decay": float("nan")}}, "weight_decay of [training] must be a finite number"),
        ({"training": {"delays": "constant:1"}}, "[training] has 'delays', which is for simulations only"),
        ({"training": {"dispatch": "queues"}}, "queues dispatch gives a client several tasks at once"),
        ({"training": {"algorithm": "fedbuf"}}, "unknown algorithm 'fedbuf': did you mean fedbuff or"),
        ({"training": {"rounds": 0}}, "rounds must be at least 1 and below 2^31, not 0."),
        ({"training": {"local_steps": 1, "local_epochs": 1}}, "exclude each other"),
        ({"training": {"local_epochs": 1}}, "local_epochs needs examples"),
        ({"training": {"examples": 10}}, "examples is for local_epochs alone"),
        (
            {"training": {"parameters": {"lrr": 1}, "algorithm": "fedbuff"}},
            "unknown parameter of fedbuff 'lrr'",
        ),
        (
            {"training": {"parameters": {"local_lr": "1"}, "algorithm": "fedavg"}},
            "must be a finite number, not '1'.",
        ),
        ({"privacy": {"clip": 1.0, "noise": 1.0, "delta": 1e-6}}, "[privacy] has no max_participations"),
        (
            {"privacy": {"noise": 1.0, "max_participations": 3}, "training": {"algorithm": "fedbuff"}},
            "noise needs clip, the most that a client may add to a sum: give it, or nothing is private.",
        ),
        (
            {"privacy": PRIVATE | {"amplified": True}},
            "amplified of [privacy] is now called simulate_amplification.",
        ),
        (
            {"privacy": PRIVATE | {"simulate_amplification": True}},
            "'simulate_amplification', which is for simulations only",
        ),
        (
            {"privacy": PRIVATE, "network": {"max_update_norm": 3.0}},
            "max_update_norm of [network] would reject uploads that [privacy] clips",
        ),
        ({"privacy": PRIVATE | {"noise_seed": 1}}, "'noise_seed', which is for simulations only"),
        ({"privacy": PRIVATE | {"delta": 2.0}}, "delta must be above 0 and below 1, not 2.0."),
        ({"privacy": PRIVATE | {"clip": {}}}, "clip of [privacy] must be a number"),
        (
            {"secure": {"helper": "https://h:1"}},
            "[secure] has no token, the token by which the helper knows the server: give it.",
        ),
        ({"secure": {"helper": "h:1", "token": "t", "minimum": 2}}, "helper of [secure] must be such as"),
        ({"secure": {"helper": "https://h:1", "token": "t"}}, "at most the buffer of 3, not 5."),
        ({"network": {"deadline": 0}}, "deadline of [network] must be above 0 seconds, not 0."),
        ({"network": {"max_upload_bytes": 0}}, "max_upload_bytes of [network] must be at least 1, not 0."),
        ({"watch": {"port": 70000}}, "port of [watch] must be at least 0 and at most 65535, not 70000."),
        ({"task": {}}, "[task] has no function, which returns the task, an offbeat.LearningTask: give it."),
        ({"task": {"function": "  "}}, "function of [task] must be a text, in quotes"),
        (
            {"task": {"function": "a:b", "losses": "a:c"}},
            "losses of [task] is now a part of the task: give function of [task], package.module:function, "
            "which returns an offbeat.LearningTask.",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tables: dict[str, Any], sentence: str) -> None:
    said = refusal(**tables)
    assert sentence in said
    assert "\n" not in said


def test_clients_have_to_be_given() -> None:
    with pytest.raises(InputError, match=r"\[training\] has no clients"):
        ServeConfig.of({"task": TASK}, Path())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "there is no settings file"),
        (b"[task\n", "is not TOML"),
        (b"\xff\xfe", "cannot be read"),
        (b"[task]\nfunction = 3\n", "serve.toml: function of [task] must be a text"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "serve.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        ServeConfig.read(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_is_refused_is_a_field_of_an_experiment_that_is_not_read() -> None:
    fields = {field.name for field in dataclasses.fields(Experiment)}
    read = {*table_keys("training"), *table_keys("prepare"), *table_keys("privacy")}
    read -= {"examples", "features", "sites"}
    assert fields == read | simulation_settings() | {"secure"}
    assert not read & simulation_settings()


VALUES = st.one_of(
    st.booleans(),
    st.integers(-3, 2**40),
    st.floats(),
    st.text(max_size=8),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
    st.sampled_from(["fedbuff", "poisson", "constant", "hinge:1:2", "tree", "banded:2", "rdp", "cpu"]),
)
TABLES = st.fixed_dictionaries(
    {},
    optional={
        name: st.dictionaries(st.sampled_from(sorted(table_keys(name))), VALUES, max_size=4)
        for name in config.TABLES
    },
)


@given(TABLES)
@settings(max_examples=300, deadline=None)
def test_settings_of_any_kind_give_a_plan_or_one_sentence(tables: dict[str, Any]) -> None:
    given = {"task": TASK | tables.pop("task", {}), "training": {"clients": 6} | tables.pop("training", {})}
    try:
        made = ServeConfig.of(given | tables, Path())
    except InputError as error:
        said = str(error)
    else:
        said = ""
        assert json.loads(json.dumps(made.settings())) == made.settings()
    assert "\n" not in said


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (True, {ValueKind.SWITCH}),
        (1, {ValueKind.INTEGER, ValueKind.NUMBER, ValueKind.DEADLINE, ValueKind.CLIP}),
        (0.5, {ValueKind.NUMBER, ValueKind.DEADLINE, ValueKind.CLIP}),
        (float("inf"), set()),
        ("a", {ValueKind.TEXT, ValueKind.DEADLINE, ValueKind.CLIP}),
        ("", set()),
        ({}, {ValueKind.TABLE}),
        ({"a": 1}, {ValueKind.TABLE, ValueKind.CLIP}),
        ([1], set()),
    ],
)
def test_a_value_is_of_certain_kinds(value: Any, kinds: set[ValueKind]) -> None:
    assert {kind for kind in ValueKind if kind.fits(value)} == kinds
