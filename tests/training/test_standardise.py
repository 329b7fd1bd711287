"""Clients agree on the mean and the standard deviation of each feature, and the model keeps them."""

import json
import logging
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offbeat
from offbeat import (
    Examples,
    Experiment,
    InputError,
    LearningTask,
    Population,
    Problem,
    Secure,
    Steps,
    Vectorised,
)
from offbeat.nn.problem import cross_entropies, mean_statistics
from offbeat.training.standardise import (
    LIMB_BITS,
    LIMBS,
    Moments,
    Scaling,
    _carried,
    _decode,
    _limbs,
    _product,
    describe_unscaled,
    measure_scaling,
)

COUNT = 300


def raw_inputs(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Features of 0 to 150, about a million, of a millionth, constant, and of a billion that varies by 1."""
    draws = torch.Generator().manual_seed(4)
    base = torch.randn(COUNT, 6, generator=draws, dtype=torch.float64)
    columns = [
        150 * torch.rand(COUNT, generator=draws, dtype=torch.float64),
        1e6 + 1e6 * base[:, 0],
        1e-6 * base[:, 1],
        torch.full((COUNT,), 3.7, dtype=torch.float64),
        torch.full((COUNT,), 0.1, dtype=torch.float64),
        1e9 + base[:, 2],
    ]
    return torch.stack(columns, 1).to(dtype)


def population(inputs: torch.Tensor, clients: int = 17) -> Population:
    """Clients of very unlike numbers of examples."""
    ends = np.unique(np.geomspace(1, len(inputs), clients + 1).astype(int))
    parts = np.split(np.random.default_rng(0).permutation(len(inputs)), ends[1:-1])
    return Population(Examples(inputs, torch.arange(len(inputs)) % 3), parts, Steps(2, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("secure", [None, Secure(5)])
def test_the_statistics_are_those_of_the_pooled_data(dtype: torch.dtype, secure: Secure | None) -> None:
    inputs = raw_inputs(dtype)
    layer = offbeat.standardise(nn.Linear(6, 3), population(inputs), secure=secure).get_submodule(
        "standardise"
    )
    pooled = inputs.double().numpy()
    mean = np.array([math.fsum(column) / COUNT for column in pooled.T])
    deviation = np.array(
        [math.sqrt(math.fsum((column - m) ** 2) / COUNT) for column, m in zip(pooled.T, mean, strict=True)]
    )
    constant = pooled.max(0) == pooled.min(0)
    assert constant.sum() >= 2
    expected = np.where(constant, 1.0, deviation)
    assert np.abs(layer.get_buffer("mean").numpy() / mean - 1).max() < 1e-9
    assert np.abs(layer.get_buffer("scale").numpy() / expected - 1).max() < 1e-9


def test_standardised_inputs_have_mean_0_and_deviation_1() -> None:
    inputs = raw_inputs()
    module = offbeat.standardise(nn.Linear(6, 3).double(), population(inputs))
    scaled = module.get_submodule("standardise")(inputs)
    moving = [0, 1, 2, 5]
    assert scaled.mean(0)[moving].abs().max() < 1e-6
    assert (scaled.std(0, correction=0)[moving] - 1).abs().max() < 1e-6
    assert scaled[:, [3, 4]].abs().max() < 1e-12


def test_a_feature_that_varies_in_its_last_bit_alone_is_constant() -> None:
    """Dividing by its deviation would make a full feature of rounding errors."""
    inputs = torch.full((40, 2), 1e9, dtype=torch.float64)
    inputs[::2, 0] = math.nextafter(1e9, math.inf)
    inputs[::2, 1] += 1.0
    layer = offbeat.standardise(nn.Linear(2, 2), population(inputs, 5)).get_submodule("standardise")
    assert layer.get_buffer("scale").tolist() == [1.0, 0.5]


def test_channels_of_images_are_features() -> None:
    images = torch.rand(40, 3, 4, 4) * torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    module = offbeat.standardise(nn.Conv2d(3, 2, 1), (images, torch.zeros(40)))
    expected = images.double().transpose(0, 1).reshape(3, -1)
    assert torch.allclose(module.get_buffer("standardise.mean"), expected.mean(1), rtol=1e-12)
    assert torch.allclose(module.get_buffer("standardise.scale"), expected.std(1, correction=0), rtol=1e-12)


def test_the_order_of_clients_changes_no_bit() -> None:
    own = population(raw_inputs())
    found = {
        measure_scaling(
            Problem(nn.Linear(6, 3).double(), cross_entropies), Population(own.data, parts, own.work)
        )
        for parts in (list(own.parts), list(own.parts)[::-1])
    }
    assert len(found) == 1
    assert found.pop().classes == (100, 100, 100)


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=8))
def test_limbs_add_up_exactly(numbers: list[float]) -> None:
    rows = [_carried(_limbs(np.array([number]))) for number in numbers]
    assert max(np.abs(row).max() for row in rows) <= 2 ** (LIMB_BITS - 1)
    total = _decode(sum(rows)[0].tolist())
    assert abs(total - sum(map(Fraction, numbers))) <= len(numbers) * Fraction(2.0**-128)


@given(st.floats(-1e15, 1e15), st.floats(-1e15, 1e15))
def test_a_product_is_two_numbers_exactly(a: float, b: float) -> None:
    if 0 < abs(a) < 1e-100 or 0 < abs(b) < 1e-100:
        return
    high, low = _product(np.array([a]), np.array([b]))
    assert Fraction(a) * Fraction(b) == Fraction(float(high[0])) + Fraction(float(low[0]))


def test_every_upload_is_within_its_bound() -> None:
    method = Moments(6, 3)
    extreme = np.full((1 + 12 + 3, LIMBS), 2.0 ** (LIMB_BITS - 1))
    assert np.linalg.norm(extreme) <= method.traits.bounds["limbs"] * (1 + 1e-12)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (torch.zeros(4, 3, dtype=torch.long), "whole numbers, such as text"),
        ((torch.zeros(4, 3), torch.zeros(4, 3)), "these are several"),
        (torch.zeros(4), "have no second axis"),
        (torch.full((4, 3), torch.nan), "NaN or infinite"),
        (torch.full((4, 3), 1e30, dtype=torch.float64), "too large"),
    ],
)
def test_other_inputs_are_refused_in_a_sentence(inputs: torch.Tensor, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        offbeat.standardise(nn.Linear(3, 2), (inputs, torch.zeros(4)))


def test_a_label_beyond_the_outputs_of_the_model_is_refused() -> None:
    data = Population(Examples(torch.rand(4, 3), torch.tensor([0, 1, 2, 1])), [np.arange(4)], Steps(1, 1))
    with pytest.raises(InputError, match="not among the 2 classes"):
        measure_scaling(Problem(nn.Linear(3, 2), cross_entropies), data)


def test_noise_is_refused_since_the_sums_have_none() -> None:
    private = {"clip": "1", "noise": 1.0, "delta": 1e-6, "max_participations": 3}
    with pytest.raises(InputError, match="sums of the features without noise"):
        Experiment.of(algorithm="fedbuff", standardise=True, **private)


def test_a_scaling_survives_the_settings_of_a_run() -> None:
    scaling = Scaling((0.1, 1 / 3), (1e-7, 3e8), 12, (5, 7))
    known = json.loads(json.dumps({"resolved": {"standardise": scaling.as_json()}}))
    assert Scaling.from_settings(known) == scaling
    assert Scaling.from_settings({}) is None


def test_constants_among_running_statistics_keep_every_bit() -> None:
    value = torch.tensor([0.1, 1 / 3, 1e9 + 0.7], dtype=torch.float64)
    assert torch.equal(mean_statistics({"a": value.expand(7, 3)})["a"], value)
    differing = value.expand(7, 3).clone()
    differing[0, 0] = 0.5
    assert torch.equal(mean_statistics({"a": differing})["a"], differing.mean(0))


def wide_task() -> LearningTask:
    """A table whose features are of 0 to 150, about a million and constant, over five clients."""
    draws = torch.Generator().manual_seed(1)
    inputs = torch.rand(100, 3, generator=draws) * torch.tensor([150.0, 1e6, 0.0]) + torch.tensor(
        [0, 1e6, 2.0]
    )
    targets = (inputs[:, 0] > 75).long()
    clients = {f"c{n}": (inputs[n::5], targets[n::5]) for n in range(5)}
    return LearningTask(module=lambda: nn.Linear(3, 2), data=clients, test=(inputs, targets), name="wide")


SETTINGS = {"rounds": 4, "local_steps": 2, "batch_size": 4, "progress": False}


def test_a_run_says_once_that_features_are_unscaled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "offbeat"):
        offbeat.run(wide_task(), "fedbuff", out=tmp_path / "raw", **SETTINGS)
        assert [record.message for record in caplog.records if "standardise" in record.message] == [
            "the features are far from unit scale (a root mean square of 1.54e+06): standardise scales them "
            "in the same way for all clients."
        ]
        caplog.clear()
        offbeat.run(wide_task(), "fedbuff", out=tmp_path / "scaled", standardise=True, **SETTINGS)
        assert not caplog.records


def test_features_near_unit_scale_and_text_are_passed_over() -> None:
    good = [
        torch.rand(30, 4),
        torch.randn(30, 4) * 3,
        torch.zeros(30, 4, dtype=torch.long),
        torch.zeros(30, 2),
    ]
    assert [describe_unscaled([Examples(each, torch.zeros(30))]) for each in good] == [None] * 4


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_run_keeps_its_scaling_with_the_model(tmp_path: Path, engine: str) -> None:
    """The module, a resumed run and another engine use the same numbers."""
    task = wide_task()
    whole = offbeat.run(
        task, "fedbuff", out=tmp_path / "whole", standardise=True, engine=engine, eval_every=2, **SETTINGS
    )
    module = whole.module()
    inputs, targets = task.test
    pooled = inputs.double()
    assert torch.allclose(module.get_buffer("standardise.mean"), pooled.mean(0), rtol=1e-9)
    assert module.get_buffer("standardise.scale")[2] == 1.0
    accuracy = (module(inputs).argmax(1) == targets).double().mean()
    assert float(accuracy) == pytest.approx(whole.records[-1]["accuracy"], abs=1e-12)
    part = {**SETTINGS, "rounds": 2}
    offbeat.run(task, "fedbuff", out=tmp_path / "part", standardise=True, engine=engine, eval_every=2, **part)
    resumed = offbeat.run(task, out=tmp_path / "part", resume=True, rounds=4, progress=False)
    state = resumed.module().state_dict()
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_secure_sums_lead_to_the_same_run(tmp_path: Path) -> None:
    models = [
        offbeat.run(
            wide_task(), "fedavg", out=tmp_path / str(secure), standardise=True, secure=secure,
            buffer=5, **SETTINGS,
        ).module()
        for secure in (False, True)
    ]  # fmt: skip
    for name in ("mean", "scale"):
        assert torch.equal(*(model.get_buffer(f"standardise.{name}") for model in models))


def test_a_standardised_module_is_trained_like_any_other() -> None:
    own = population(raw_inputs(torch.float32))
    problem = Problem(offbeat.standardise(nn.Linear(6, 3), own), cross_entropies)
    steps = offbeat.train(
        offbeat.build("fedbuff", offbeat.Setting(4, 2, 3), {}), Vectorised(problem, own),
        dispatch=offbeat.Asynchronous(6), buffer=4, rounds=3,
    )  # fmt: skip
    last = list(steps)[-1]
    assert torch.equal(last.statistics["standardise.mean"], problem.initial()[1]["standardise.mean"])
    assert problem.module(last.x).get_buffer("standardise.scale")[3] == 1.0
