"""The catalogue finds its methods, and an algorithm opts in by its traits alone."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from offbeat.algorithms import CATALOGUE, current_name, find
from offbeat.algorithms.ca2fl import CA2FL
from offbeat.algorithms.fedsps import FedSPS
from offbeat.algorithms.registry import check_ranges, discover
from offbeat.algorithms.scaffold import Scaffold
from offbeat.core import Traits, traits_of
from offbeat.errors import InputError
from offbeat.schedule.staleness import parse_weights
from offbeat.training.experiment import present_settings
from oracles.cases import load_cases


@dataclass(frozen=True)
class Odd:
    """Hyperparameters with the names that once opted in."""

    repeats: bool = True
    span: int = 3
    whole: bool = True
    two_trips: bool = True
    reads_staleness: bool = True
    reads_rank: bool = True
    bounds: tuple[()] = ()
    full_pass: bool = True


def test_a_hyperparameter_does_not_opt_in_by_its_name() -> None:
    assert traits_of(Odd()) == Traits()  # type: ignore[arg-type]
    assert traits_of(Scaffold(0.1, whole=True)) == Traits(full_pass=True)
    assert traits_of(Scaffold(0.1)) == Traits()
    assert [name for name, value in Traits()._asdict().items() if value] == []  # the default asks for nothing


def test_traits_that_are_something_else_are_refused() -> None:
    @dataclass(frozen=True)
    class Wrong:
        traits: str = "kind"

    with pytest.raises(InputError, match="the traits of Wrong must be a Traits value, not 'kind'"):
        traits_of(Wrong())  # type: ignore[arg-type]


def test_every_method_of_the_catalogue_is_compared_with_its_oracle() -> None:
    assert CATALOGUE.keys() == {case.method for case in load_cases().values()}


def test_a_method_gives_ranges_of_its_own() -> None:
    @dataclass(frozen=True)
    class Made:
        local_lr: float
        momentum: float

        def __post_init__(self) -> None:
            check_ranges(self, momentum="[0, 1)")

    Made(0.0, 0.0)
    with pytest.raises(InputError, match=r"the momentum of Made must lie in \[0, 1\), not be 1.0"):
        Made(0.1, 1.0)
    with pytest.raises(InputError, match="the local_lr of Made must lie in"):
        Made(-0.1, 0.0)


def test_two_files_do_not_define_one_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "doubled"
    package.mkdir()
    for name in ("__init__", "one", "other"):
        (package / f"{name}.py").write_text("METHODS = {'same': 1}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match="two files of doubled define the method same"):
        discover("doubled", [str(package)])


@pytest.mark.parametrize(("former", "now"), [("fedavg-m", "fedcm"), ("fedavg-m-vr", "fedcm-vr")])
def test_a_former_name_is_answered_with_the_one_of_now_and_read_from_files(former: str, now: str) -> None:
    with pytest.raises(InputError, match=f"the algorithm '{former}' is now called '{now}': use that name"):
        find(former)
    assert current_name(former) == now
    assert current_name("fedbuff") == "fedbuff"
    assert present_settings({"algorithm": former, "dispatch": "rounds"}) == {
        "algorithm": now,
        "dispatch": "round-refill",
    }


def test_an_unknown_method_is_answered_with_near_ones() -> None:
    with pytest.raises(InputError, match="unknown algorithm 'fedbuf': did you mean fedbuff"):
        find("fedbuf")


@pytest.mark.parametrize(
    "modules",
    ["algorithms", "schedule.statistics", "privacy.ledger", "privacy.correlated", "privacy.accountant"],
)
def test_names_times_and_figures_need_no_torch(modules: str) -> None:
    code = f"import sys, offbeat.{modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_defaults_are_those_of_the_papers() -> None:
    assert CATALOGUE["fadas"].parameters()["server_lr"].default == 3e-4
    assert CATALOGUE["fadas-da"].parameters()["server_lr"].default == 1e-3
    assert CATALOGUE["dude"].buffer == CATALOGUE["fedasync"].buffer == 1


def test_fedasync_without_delay_gives_a_model_its_whole_weight_and_no_pull() -> None:
    """Both differ from the paper, which counts the staleness from 1 and has a pull of 0.005."""
    method = CATALOGUE["fedasync"]
    assert method.parameters()["rho"].default == 0
    assert parse_weights(method.weights)(0) == 1


def test_the_theory_of_ca2fl_has_rates_without_delay() -> None:
    assert CA2FL.tuned(10, 5, 1.0, worst=0) == CA2FL.tuned(10, 5, 1.0, worst=1)
    assert CA2FL.tuned(10, 5, 1.0, worst=4).local_lr == pytest.approx(
        CA2FL.tuned(10, 5, 1.0, worst=1).local_lr / 2
    )


def test_the_theory_of_fedsps_has_two_bounds_of_which_the_lower_holds() -> None:
    assert FedSPS.tuned(steps=1, smoothness=2.0, c=100.0).bound == pytest.approx(1 / (2 * 100.0 * 2.0))
    assert FedSPS.tuned(steps=8, smoothness=2.0, c=100.0).bound == pytest.approx(1 / (2 * 100.0 * 2.0))
    assert FedSPS.tuned(steps=9, smoothness=2.0, c=100.0).bound == pytest.approx(1 / (25 * 9 * 2.0))
