"""The noise that an experiment's epsilon comes to."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.aggregate.mean import AggregationContext, Mean
from offbeat.aggregate.private import Private
from offbeat.algorithms import Setting, build
from offbeat.errors import InputError
from offbeat.privacy.accountant import calibrate, parse_accountant
from offbeat.privacy.correlated import BandedNoise, TreeNoise, parse_correlation
from offbeat.schedule.dispatch import Asynchronous, Dispatch, Poisson
from offbeat.schedule.staleness import Equal
from offbeat.training.build import build_aggregate, parameters_under_noise, with_calibrated_noise
from offbeat.training.experiment import Experiment

ALGORITHM = build("fedbuff", Setting(10, 1, 50), {})


def noise_of(experiment: Experiment, dispatch: Dispatch) -> float:
    opening = AggregationContext(
        ALGORITHM, torch.zeros(1), dispatch, Equal(), 10, 1000, experiment.rounds, math.inf, 0
    )
    found = with_calibrated_noise(experiment, opening).noise
    assert found is not None
    return found


def private(**given: object) -> Experiment:
    setting = {"algorithm": "fedbuff", "clients": 1000, "rounds": 50, "weights": "constant"}
    return Experiment.of(**setting | {"clip": "1", "delta": 1e-6} | given)


@given(st.floats(0.1, 20), st.integers(1, 60))
def test_noise_for_an_epsilon_is_the_least_and_a_little(epsilon: float, most: int) -> None:
    found = noise_of(private(epsilon=epsilon, max_participations=most), Asynchronous(20))
    least = calibrate(epsilon, 1e-6, min(most, 50))
    assert least <= found <= 1.003 * least
    assert found == float(f"{found:.4g}")


def test_noise_for_an_epsilon_under_sampling_is_the_least_and_a_little() -> None:
    found = noise_of(private(epsilon=2.0, simulate_amplification=True, dispatch="poisson"), Poisson(0.02))
    least = calibrate(2.0, 1e-6, 50, 0.02)
    assert 0.999 * least <= found <= 1.004 * least  # the least is itself known to one part in a thousand


@pytest.mark.parametrize(("shape", "apart"), [("tree", 1), ("banded:4", 4)])
def test_noise_for_an_epsilon_grows_with_the_sensitivity_of_its_shape(shape: str, apart: int) -> None:
    found = noise_of(private(epsilon=2.0, max_participations=5, noise_correlation=shape), Asynchronous(20))
    least = calibrate(2.0, 1e-6, 1) * parse_correlation(shape).sensitivity(50, 5, apart)
    assert least <= found <= 1.003 * least


def test_a_noise_that_is_given_stays() -> None:
    assert noise_of(private(epsilon=2.0, noise=3.0, max_participations=5), Asynchronous(20)) == 3.0


def test_without_a_bound_it_is_the_mean() -> None:
    assert build_aggregate(Experiment.of(algorithm="fedbuff"), ALGORITHM) == Mean()


def test_bounds_are_of_the_field_that_is_named_or_of_the_only_one() -> None:
    for clip in ("0.5", "delta=0.5"):
        made = build_aggregate(private(clip=clip, noise=1.0, max_participations=2), ALGORITHM)
        assert isinstance(made, Private)
        assert made.bounds == (("delta", 0.5),)


def test_bounds_that_a_method_guarantees_are_those_that_could_be_named() -> None:
    for parameters, clip in (((), "descent=1"), ((("variates", True),), "descent=1,shift=2")):
        own = private(algorithm="cadence", parameters=parameters, clip=None, noise=1.0, max_participations=2)
        cadence = build("cadence", Setting(10, 1, 50), dict(own.parameters))
        named = private(
            algorithm="cadence", parameters=own.parameters, clip=clip, noise=1.0, max_participations=2
        )
        assert build_aggregate(own, cadence) == build_aggregate(named, cadence)


def test_shapes_and_accountants_are_read_from_their_own_names() -> None:
    assert parse_correlation("tree") == TreeNoise()
    assert parse_correlation("banded:7") == BandedNoise(7)
    for text in ("independent", "tree", "banded:7"):
        assert parse_correlation(text).name == text
    for text in ("pld", "rdp"):
        assert parse_accountant(text).name == text
    with pytest.raises(InputError, match="unknown shape of noise"):
        parse_correlation("band")


def test_momentum_approximation_trusts_noisy_rows_less_unless_its_solver_was_chosen() -> None:
    asked = {"algorithm": "ma-fedavgm", "clip": "0.5", "noise": 1.0, "delta": 1e-5, "max_participations": 9}
    for parameters, penalty in (
        ((), (1.0 / math.sqrt(1 - 1 / 1.21) / 10) ** 2),
        ((("penalty", 0.5),), 0.5),
        ((("rcond", 0.01),), None),
    ):
        made = Experiment.of(**asked, parameters=parameters)
        aggregate = build_aggregate(made, build("ma-fedavgm", Setting(1, 1, 1), {}))
        assert parameters_under_noise(made, aggregate).get("penalty") == (
            None if penalty is None else pytest.approx(penalty)
        )
    plain = Experiment.of(algorithm="ma-fedavgm")
    assert parameters_under_noise(plain, Mean()) == {}
