"""Local optimisers and schedules of rates around the methods of the catalogue."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from offbeat import (
    CATALOGUE,
    Asynchronous,
    Batch,
    Batches,
    Cohort,
    Experiment,
    Exponential,
    FedOpt,
    InputError,
    Phases,
    RoundRefill,
    Sequential,
    Setting,
    Synchronous,
    Vectorised,
    Visit,
    build,
    register,
    sgd,
    train,
)
from offbeat.algorithms.fedasync import Model
from offbeat.algorithms.rates import (
    ConstantRate,
    CosineRate,
    LinearRate,
    LocalAdam,
    LocalAdamW,
    LocallyOptimized,
    LocalMomentum,
    LocalNesterov,
    LocalSGD,
    Scheduled,
    StepRate,
    WarmupRate,
    over_rounds,
)
from offbeat.core import AnyAlgorithm, LocalRule
from offbeat.schedule.dispatch import Dispatch
from offbeat.training.method import build_method, parse_schedule
from worlds import SEED, make_world, play

ENGINES = {"sequential": Sequential, "vectorised": Vectorised}
SYSTEM = Setting(3, 3, 4)
GIVEN = {"local_lr": 0.04, "server_lr": 0.06}
HALVED = {"local_lr": 0.02, "server_lr": 0.03}


def dispatch_of(name: str) -> Dispatch:
    wanted: dict[str, Dispatch] = {"phases": Phases(3), "round-refill": RoundRefill(5)}
    return wanted.get(CATALOGUE[name].dispatch, Asynchronous(5))


def rates(name: str, values: dict[str, float]) -> dict[str, Any]:
    return {rate: value for rate, value in values.items() if rate in CATALOGUE[name].parameters()}


def last(algorithm: AnyAlgorithm, engine: str, dispatch: Dispatch = Asynchronous(5), **options: Any) -> Any:
    world = make_world()
    made = ENGINES[engine](world.problem, world.population, Exponential(1.0))
    return play(algorithm, made, dispatch, **{"rounds": 4} | options)[-1].x.numpy()


@pytest.mark.parametrize("name", sorted(name for name in CATALOGUE.own if rates(name, GIVEN)))
def test_a_schedule_of_one_half_is_the_method_at_half_its_rates(name: str) -> None:
    """Every method takes its rates from the schedule, and its clients theirs from the message."""
    given = rates(name, GIVEN)
    inner = build(name, SYSTEM, given)
    schedules = [(lambda version: 0.5) if rate in given else None for rate in GIVEN]
    limit = CATALOGUE[name].max_staleness
    options = {"max_staleness": float("inf") if limit is None else limit}
    expected = last(build(name, SYSTEM, rates(name, HALVED)), "sequential", dispatch_of(name), **options)
    for engine in ENGINES:
        found = last(Scheduled(inner, *schedules), engine, dispatch_of(name), **options)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert np.abs(expected - last(inner, "vectorised", dispatch_of(name), **options)).max() > 1e-9


LOCAL_SGD = {
    *("ca2fl", "defedavg", "defedavg-iid", "dog", "fadas", "fadas-da", "fedadagrad", "fedadam", "fedams"),
    *("fedasync", "fedavg", "fedavgm", "fedbuff", "feddyn", "fedexp", "fedprox", "fedyogi"),
    *("ma-fadas", "ma-fedadagrad", "ma-fedadam", "ma-fedavgm", "weight-prediction"),
    *("ma-light-fadas", "ma-light-fedadagrad", "ma-light-fedadam", "ma-light-fedavgm"),
}


@pytest.mark.parametrize("name", sorted(CATALOGUE.own))
def test_methods_of_local_sgd_take_an_optimiser_and_the_others_say_that_they_do_not(name: str) -> None:
    for settings in ({"local_optimizer": "adam"}, {"clip_grad_norm": 1.0}):
        experiment = Experiment.of(algorithm=name, **settings)
        if name in LOCAL_SGD:
            assert isinstance(build_method(experiment, SYSTEM, {}), LocallyOptimized)
        else:
            with pytest.raises(InputError, match=f"{name} takes local steps of its own kind, which"):
                build_method(experiment, SYSTEM, {})


def plain_descent(rule: LocalRule, steps: int = 7) -> torch.Tensor:
    """Steps on |x - k|^2 / 2 x scale, k the number of the minibatch."""
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    batches = Batches(tuple(Batch((torch.tensor([float(k)], dtype=torch.float64),)) for k in range(steps)))
    return sgd(x, batches, gradient, rule)


def gradient(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    scale = torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64)
    return scale * (x - batch.data[0])


TORCH = {
    "sgd": (LocalSGD(), torch.optim.SGD, {}),
    "momentum": (LocalMomentum(0.8), torch.optim.SGD, {"momentum": 0.8}),
    "nesterov": (LocalNesterov(0.8), torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "adam": (LocalAdam(0.7, 0.9, 1e-4), torch.optim.Adam, {"betas": (0.7, 0.9), "eps": 1e-4}),
    "adamw": (
        LocalAdamW(0.3, 0.7, 0.9, 1e-4),
        torch.optim.AdamW,
        {"betas": (0.7, 0.9), "eps": 1e-4, "weight_decay": 0.3},
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_local_optimisers_are_those_of_torch(name: str) -> None:
    own, theirs, options = TORCH[name]
    x = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    optimizer = theirs([x], lr=0.05, **options)
    for k in range(7):
        x.grad = gradient(x.detach(), Batch((torch.tensor([float(k)], dtype=torch.float64),)))
        torch.nn.utils.clip_grad_norm_([x], 2.0)
        optimizer.step()
    # torch adds 1e-6 to a norm before it divides by it
    torch.testing.assert_close(plain_descent(LocalRule(0.05, own, 2.0)), x.detach(), rtol=1e-5, atol=1e-5)


def test_a_gradient_of_zero_is_not_divided_by_its_norm() -> None:
    rule, zero = LocalRule(0.1, LocalSGD(), 1.0), torch.zeros(3)
    assert torch.equal(rule.step(zero, (), zero)[0], zero)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_momentum_no_decay_and_a_bound_that_is_never_met_change_nothing(engine: str) -> None:
    plain = last(FedOpt(0.2, 0.5), engine)
    for optimizer in (LocalSGD(), LocalMomentum(0.0), LocalNesterov(0.0)):
        found = last(LocallyOptimized(FedOpt(0.2, 0.5), optimizer, 1e6), engine)
        np.testing.assert_allclose(found, plain, rtol=0, atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["feddyn", "masfl"])
def test_a_run_with_schedules_resumes_to_the_bit(name: str, engine: str) -> None:
    settings: dict[str, Any] = {"local_lr_schedule": "warmup:2,cosine", "server_lr_schedule": "step:2:0.5"}
    if name == "feddyn":
        settings |= {"local_optimizer": "momentum:0.5", "clip_grad_norm": 0.3}
    algorithm = build_method(Experiment.of(algorithm=name, **settings), Setting(3, 3, 6), GIVEN)
    world = make_world()
    made = ENGINES[engine](world.problem, world.population, Exponential(1.0))
    options = {"dispatch": Asynchronous(6), "buffer": 3, "rounds": 6, "seed": SEED}
    whole, saved = [], None
    for shot in train(algorithm, made, **options):
        whole.append(shot.x)
        if shot.version == 3:
            saved = shot.checkpoint()
    rest = [shot.x for shot in train(algorithm, made, **options, resume=saved)]
    assert all(torch.equal(one, other) for one, other in zip(whole[4:], rest, strict=True))
    other = build_method(
        Experiment.of(algorithm=name, **settings | {"local_lr_schedule": "cosine"}), SYSTEM, {}
    )
    with pytest.raises(InputError, match="the checkpoint is of another run: algorithm was Scheduled"):
        next(train(other, made, **options, resume=saved))


def test_schedules_have_the_values_of_their_definitions() -> None:
    cosine = over_rounds(CosineRate(0.2), 10)
    assert [cosine(0), cosine(5), cosine(10), cosine(99)] == pytest.approx([1, 0.6, 0.2, 0.2])
    assert [over_rounds(LinearRate(0.5), 10)(t) for t in (0, 5, 10, 20)] == [1, 0.75, 0.5, 0.5]
    assert [StepRate(3, 0.5)(t) for t in (0, 2, 3, 6)] == [1, 1, 0.5, 0.25]
    assert [WarmupRate(4)(t) for t in (0, 1, 3, 9)] == [0.25, 0.5, 1, 1]
    both = over_rounds(WarmupRate(2).then(LinearRate(0.0)), 12)
    assert [both(t) for t in (0, 1, 2, 7, 12)] == [0.5, 1, 1, 0.5, 0]
    assert parse_schedule("warmup:2,linear", "") == WarmupRate(2).then(LinearRate())


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        (
            "fedbuff",
            {"local_lr_schedule": "cosine:much"},
            "'much' in the rate schedule 'cosine:much' is not a",
        ),
        ("fedbuff", {"local_lr_schedule": "cosin"}, "unknown rate schedule 'cosin': did you mean cosine"),
        ("fedbuff", {"local_lr_schedule": "step"}, "'step' is not a rate schedule: write it as step:EVERY"),
        ("fedbuff", {"local_lr_schedule": "step:0.5"}, "must be a whole number of at least 1, not 0.5"),
        ("fedbuff", {"local_lr_schedule": "cosine:-1"}, "end of a cosine schedule must lie in"),
        ("fedbuff", {"local_lr_schedule": "cosine,step:3"}, "the first must be a warm-up"),
        ("fedbuff", {"local_lr_schedule": "math:pie"}, "the module 'math' has no 'pie'"),
        (
            "fedbuff",
            {"server_lr_schedule": "math:nan"},
            "server_lr_schedule 'math:nan' is a float, not a func",
        ),
        ("cadence", {"local_lr_schedule": "cosine"}, "cadence has no local_lr to set, so it has no schedule"),
        ("fedexp", {"server_lr_schedule": "cosine"}, "fedexp has no server_lr to set"),
        ("adamasfl", {"server_lr_schedule": "cosine"}, "computes its server_lr from the run: give"),
        (
            "fedbuff",
            {"local_lr_schedule": "os:getcwd"},
            r"failed for version 0 \(TypeError: .*\): it must be a",
        ),
        ("fedbuff", {"server_lr_schedule": "math:log"}, r"failed for version 0 \(ValueError: math"),
        ("fedbuff", {"server_lr_schedule": "builtins:range"}, r"gave range\(0, 0\) for version 0"),
        ("fedbuff", {"local_optimizer": "adm"}, "unknown local optimiser 'adm': did you mean adam"),
        ("fedbuff", {"local_optimizer": "momentum:1"}, "beta of local momentum must lie in"),
        ("fedbuff", {"local_optimizer": "adam:x"}, "'x' in the local optimiser 'adam:x' is not a number"),
        ("fedbuff", {"clip_grad_norm": -1.0}, "clip_grad_norm must be above 0 and finite, not -1.0"),
        ("fedbuff", {"local_optimizer": "adamw", "weight_decay": 0.1}, "adamw has a weight decay of its own"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    name: str, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        build_method(Experiment.of(algorithm=name, **settings), SYSTEM, {})


def test_a_schedule_whose_rate_is_beyond_float32_sends_the_largest_rate() -> None:
    method = Scheduled(FedOpt(0.1, 1.0), local_schedule=lambda version: 1e300)
    assert method.broadcast(method.init(torch.zeros(1)), 0).local_lr.item() == np.float32(1e38)


def test_a_schedule_that_gives_no_rate_is_refused() -> None:
    for factor in (-1.0, float("nan"), "much"):
        with pytest.raises(InputError, match="for version 0: return a number of at least 0"):
            last(Scheduled(FedOpt(0.1, 1.0), lambda version, factor=factor: factor), "sequential")
    with pytest.raises(InputError, match="FedSPS has no local_lr"):
        Scheduled(build("fedsps", SYSTEM, {}), ConstantRate())


def test_a_method_of_ones_own_that_needs_a_plain_rate_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CATALOGUE, "_added", {})

    @dataclass(frozen=True)
    class Plain:
        local_lr: float = 0.1

        def init(self, x: torch.Tensor) -> Model:
            return Model(x)

        def memory(self, x: torch.Tensor) -> tuple[()]:
            return ()

        def broadcast(self, state: Model, version: int) -> Model:
            return state

        def local(
            self, message: Model, memory: tuple[()], batches: Batches, visit: Visit, grad: Any
        ) -> tuple[Model, tuple[()]]:
            return Model(message.x.mul(1 + float(self.local_lr))), memory

        def step(self, state: Model, mean: Model, cohort: Cohort) -> Model:
            return Model(state.x - mean.x)

        def warmup(self) -> None:
            return None

    register("plain-rate", Plain)
    experiment = Experiment.of(algorithm="plain-rate", local_lr_schedule="cosine")
    with pytest.raises(InputError, match="plain-rate uses its local_lr as a plain number"):
        build_method(experiment, SYSTEM, {})
    with pytest.raises(InputError, match="takes local steps of its own kind"):
        build_method(Experiment.of(algorithm="plain-rate", local_optimizer="adam"), SYSTEM, {})


def test_a_synchronous_round_has_the_rates_of_its_version() -> None:
    seen: list[int] = []

    def watched(version: int) -> float:
        seen.append(version)
        return 1.0

    last(Scheduled(FedOpt(0.2, 0.5), server_schedule=watched), "vectorised", Synchronous(3))
    assert seen == [0, 1, 2, 3]
