"""Compressed uploads: the oracles, what is lost, what is kept, what is counted, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import (
    Asynchronous,
    Dropout,
    EightBit,
    Experiment,
    Exponential,
    FedOpt,
    InputError,
    Mean,
    Phases,
    Poisson,
    Private,
    RoundRefill,
    Secure,
    Sequential,
    Setting,
    Synchronous,
    TopK,
    Vectorised,
    build,
    draws,
)
from offbeat.aggregate.compression import (
    Compressed,
    Compression,
    Quantised,
    Sparse,
    decode,
    invalid_code,
    parse_compression,
)
from offbeat.aggregate.uploads import probe_upload
from offbeat.core import AnyAlgorithm, Batch, Batches, Visit, traits_of
from offbeat.engines.process_pool import Workers
from offbeat.engines.simulation import task_work
from offbeat.privacy import clipping
from offbeat.schedule.dispatch import Dispatch
from offbeat.schedule.participation import Participation
from offbeat.training.loop import train
from offbeat.training.replay import replay
from oracles.compression import compressed_fedbuff, eight_bits, largest
from worlds import SEED, make_world, play, trace

KEY = torch.tensor(draws.torch_seed(3, "upload", 5, 7))
DISPATCHES: list[Dispatch] = [Asynchronous(6), Asynchronous(6, eager=False), Synchronous(3), RoundRefill(5)]
vectors = st.builds(
    lambda size, seed, tail: np.random.default_rng(seed).standard_t(tail, size),
    st.integers(1, 1500),
    st.integers(0, 1000),
    st.sampled_from([1.5, 30]),
)


def task_key(client: int, visit: int) -> int:
    return draws.torch_seed(SEED, "upload", client, visit)


@pytest.mark.parametrize("kind", [Sequential, Vectorised])
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("compress", [EightBit(), TopK(0.2)])
def test_compressed_fedbuff_is_the_oracle(compress: Compression, dispatch: Dispatch, kind: Any) -> None:
    world = make_world()
    shots = play(
        FedOpt(0.1, 0.5), kind(world.problem, world.population), dispatch, rounds=12, compress=compress
    )
    count = math.ceil(0.2 * len(shots[0].x)) if isinstance(compress, TopK) else None
    models = compressed_fedbuff(
        world.oracle,
        shots[0].x.numpy(),
        trace(shots),
        local_lr=0.1,
        server_lr=0.5,
        key=task_key,
        count=count,
    )
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)


@settings(max_examples=30)
@given(vectors)
def test_a_vector_in_eight_bits_is_the_oracles(vector: Any) -> None:
    code = EightBit().encode(torch.from_numpy(vector), KEY)
    expected = eight_bits(vector, int(KEY))
    np.testing.assert_allclose(decode(code, len(vector)).numpy(), expected, rtol=0, atol=1e-12)


@settings(max_examples=30)
@given(vectors, st.floats(0.01, 1))
def test_top_k_keeps_the_largest_numbers(vector: Any, share: float) -> None:
    code = TopK(share).encode(torch.from_numpy(vector), KEY)
    count = math.ceil(share * len(vector) - 1e-9)
    np.testing.assert_array_equal(decode(code, len(vector)).numpy(), largest(vector, count))
    assert len(code.places) == count


@settings(max_examples=30)
@given(vectors)
def test_rounding_moves_no_number_by_more_than_a_level_and_no_norm_by_more_than_it_says(vector: Any) -> None:
    rounded = decode(EightBit().encode(torch.from_numpy(vector), KEY), len(vector)).numpy()
    for start in range(0, len(vector), 1024):
        part = slice(start, start + 1024)
        level = np.abs(vector[part]).max() / 127
        assert np.abs(rounded[part] - vector[part]).max() <= level * (1 + 1e-9)
    assert np.linalg.norm(rounded) <= EightBit().growth * np.linalg.norm(vector) * (1 + 1e-9)


def test_rounding_at_random_has_mean_zero() -> None:
    vector = torch.linspace(-1, 1, 64, dtype=torch.float64) ** 3
    keys = [torch.tensor(draws.torch_seed(0, "upload", 1, visit)) for visit in range(1500)]
    mean = sum(decode(EightBit().encode(vector, key), 64) for key in keys) / len(keys)
    error = (mean - vector).abs().max()
    assert error < 5 * (1 / 127) / 2 / math.sqrt(len(keys))  # five standard errors at most


@pytest.mark.parametrize("compress", [EightBit(), TopK(0.1)])
def test_zeros_stay_zeros(compress: Compression) -> None:
    zeros = torch.zeros(1500)
    assert torch.equal(decode(compress.encode(zeros, KEY), 1500), zeros)


@pytest.mark.parametrize("compress", [EightBit(), TopK(0.1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_not_hidden(compress: Compression, bad: float) -> None:
    vector = torch.ones(50)
    vector[7] = bad
    assert not torch.isfinite(decode(compress.encode(vector, KEY), 50)).all()


METHODS = ["fedbuff", "fadas", "scaffold", "ca2fl", "adamasfl", "cadence", "fednova", "fedexp"]


@pytest.mark.parametrize("compress", [EightBit(), TopK(0.2)])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_vectors_gives_the_same_on_both_engines(name: str, compress: Compression) -> None:
    world = make_world()
    algorithm = build(name, Setting(3, 3, 8), {})
    dispatch = Synchronous(3) if name == "scaffold" else Asynchronous(5)
    shots = [
        play(algorithm, kind(world.problem, world.population), dispatch, compress=compress)
        for kind in (Sequential, Vectorised)
    ]
    torch.testing.assert_close(shots[0][-1].x, shots[1][-1].x, rtol=0, atol=1e-9)
    assert [shot.sent for shot in shots[0]] == [shot.sent for shot in shots[1]]


@pytest.mark.slow
def test_workers_give_the_same_to_the_bit() -> None:
    world = make_world()
    runs = [
        play(FedOpt(0.1, 1.0), engine, Asynchronous(5), compress=TopK(0.2))
        for engine in (
            Sequential(world.problem, world.population),
            Workers(world.problem, world.population, workers=2),
        )
    ]
    assert torch.equal(runs[0][-1].x, runs[1][-1].x)


@pytest.mark.parametrize("kind", [Sequential, Vectorised])
@pytest.mark.parametrize("name", ["fedbuff", "ca2fl", "padamfed-vr"])
def test_what_was_left_out_survives_a_cut_to_the_bit(name: str, kind: Any) -> None:
    world = make_world()
    engine = kind(world.problem, world.population, Exponential(1.0), dropout=Dropout(0.2))
    algorithm = build(name, Setting(3, 3, 8), {})
    options: dict[str, Any] = {
        "dispatch": Asynchronous(6),
        "buffer": 3,
        "rounds": 8,
        "max_staleness": 2,
        "compress": TopK(0.1),
    }
    whole = list(train(algorithm, engine, **options))
    for cut in (0, 4):
        saved = next(shot.checkpoint() for shot in train(algorithm, engine, **options) if shot.version == cut)
        rest = list(train(algorithm, engine, resume=saved, **options))
        assert torch.equal(whole[-1].x, rest[-1].x)
        assert whole[-1].sent == rest[-1].sent
    with pytest.raises(InputError, match=r"compress was TopK\(share=0.1\), now None"):
        next(train(algorithm, engine, resume=saved, **options | {"compress": None}))


class Pull:
    """A gradient that pulls each coordinate to another place."""

    def __call__(self, x: torch.Tensor, batch: Batch, /) -> torch.Tensor:
        return x - torch.arange(len(x)).double() ** 2

    def with_loss(self, x: torch.Tensor, batch: Batch, /) -> tuple[torch.Tensor, torch.Tensor]:
        return self(x, batch), x.new_zeros(())

    def descend(self, x: torch.Tensor, batch: Batch, lr: float, /) -> torch.Tensor:
        return x - lr * self(x, batch)


def test_what_a_client_has_sent_and_what_it_keeps_add_up_to_all_its_updates() -> None:
    x = torch.zeros(18, dtype=torch.float64)
    plain = FedOpt(0.1, 1.0)
    algorithm = Compressed(plain, TopK(0.1), len(x))
    batches, visit = Batches((Batch((x,)),)), Visit(torch.tensor(0), torch.tensor(0), (), KEY)
    whole, sent, memory = torch.zeros_like(x), torch.zeros_like(x), algorithm.memory(x)
    for number in range(20):
        message = plain.broadcast(plain.init(x + number), 0)
        upload, memory = algorithm.local(message, memory, batches, visit, Pull())
        assert len(upload.delta.places) == 2
        sent += algorithm.decode(upload).delta
        whole += plain.local(message, (), batches, visit, Pull())[0].delta
    torch.testing.assert_close(sent + memory.residual[0], whole, rtol=0, atol=1e-10)
    assert float(memory.residual[0].norm()) < 0.5 * float(whole.norm())


def test_the_vectors_of_an_upload_are_rounded_independently() -> None:
    """After a step SCAFFOLD's variate changes by the update over the rate: one key rounds both alike."""
    x = torch.linspace(-1, 1, 1500, dtype=torch.float64)
    plain = build("scaffold", Setting(3, 3, 8), {"local_lr": 0.5})
    algorithm = Compressed(plain, EightBit(), len(x))
    batches, visit = Batches((Batch((x,)),)), Visit(torch.tensor(0), torch.tensor(0), (), KEY)
    upload, _ = algorithm.local(
        plain.broadcast(plain.init(x), 0), algorithm.memory(x), batches, visit, Pull()
    )
    decoded = algorithm.decode(upload)
    largest_level = float(upload.delta.scales.max())
    torch.testing.assert_close(decoded.delta, 0.5 * decoded.shift, rtol=0, atol=1.001 * largest_level)
    differing = (upload.delta.levels != upload.shift.levels).float().mean()
    assert 0.2 < differing < 0.5  # 1/3 in the mean over where a number lies between two levels


def test_a_replay_of_the_trace_gives_the_model() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population)
    shots = play(FedOpt(0.1, 1.0), engine, Asynchronous(6), compress=TopK(0.2))
    lines = [
        {
            "version": shot.version,
            "time": shot.time,
            "tasks": [
                [*task, *when]
                for task, *when in zip(
                    shot.filled.tasks, shot.filled.started, shot.filled.arrived, strict=True
                )
            ],
            "dropped": [],
            "lost": [],
        }
        for shot in shots[1:]
        if shot.filled
    ]
    again = list(
        replay(
            FedOpt(0.1, 1.0),
            engine,
            lines,
            dispatch=Asynchronous(6),
            buffer=3,
            seed=SEED,
            compress=TopK(0.2),
        )
    )
    assert torch.equal(again[-1].x, shots[-1].x)


@pytest.mark.parametrize(
    ("compress", "expected"),
    [(EightBit(), (18 + 8) / 8), (TopK(0.2), 4 * (4 + 8) / 8), (None, 18)],
)
def test_records_count_the_bytes_of_what_is_sent(compress: Compression | None, expected: float) -> None:
    """In numbers of the model's float64: levels of one byte and a scale, or places of four and values."""
    world = make_world()
    last = play(
        FedOpt(0.1, 1.0), Sequential(world.problem, world.population), Synchronous(3), compress=compress
    )[-1]
    assert len(last.x) == 18
    assert last.sent.up == 8 * 3 * math.ceil(expected)
    assert last.sent.down == 8 * 3 * 18


def test_the_sensitivity_of_a_private_sum_holds_since_clipping_comes_after_decoding() -> None:
    world = make_world()
    algorithm = FedOpt(5.0, 1.0)
    seen: list[float] = []
    made = Private.of(algorithm, 0.01, 0.0, 1e-3, participation=Participation(50, 1))

    class Watched:
        participation = made.participation

        def open(self, opening: Any) -> Any:
            inner = made.open(opening)
            total = inner._summing.total

            def watch(payload: Any, *rest: Any) -> Any:
                seen.extend(clipping.norms(payload.uploads).tolist())
                return total(payload, *rest)

            object.__setattr__(inner, "_summing", Proxy(inner._summing, watch))
            return inner

    for compress in (EightBit(), TopK(0.3)):
        play(
            algorithm,
            Sequential(world.problem, world.population),
            Asynchronous(5),
            aggregate=Watched(),
            compress=compress,
        )
    assert len(seen) == 2 * 8 * 3
    assert max(seen) <= 0.01
    assert min(seen) > 0.0099  # all of them are longer than the bound


class Proxy:
    """A running sum whose `total` is watched."""

    def __init__(self, inner: Any, total: Any) -> None:
        self._inner, self.total = inner, total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_bounds_of_a_method_hold_after_rounding_and_are_not_claimed_with_feedback() -> None:
    algorithm: AnyAlgorithm = build("adamasfl", Setting(3, 3, 8), {})
    own = traits_of(algorithm).bounds["descent"]
    assert traits_of(Compressed(algorithm, EightBit(), 9)).bounds["descent"] > own
    assert not traits_of(Compressed(algorithm, TopK(0.5), 9)).bounds


def test_the_start_of_everybody_is_sent_as_it_is() -> None:
    algorithm = build("padamfed-vr", Setting(3, 3, 8), {})
    begin = Compressed(algorithm, TopK(0.1), 30).warmup()
    assert begin is not None
    assert not [part for part in probe_upload(begin, torch.zeros(30)) if isinstance(part, Sparse)]
    usual = probe_upload(Compressed(algorithm, TopK(0.1), 30), torch.zeros(30))
    assert [type(part) for part in usual] == [Sparse] * 3


@pytest.mark.parametrize(
    "code",
    [
        Sparse(torch.tensor([0, 18], dtype=torch.int32), torch.ones(2)),
        Sparse(torch.tensor([-1, 3], dtype=torch.int32), torch.ones(2)),
        Sparse(torch.tensor([3, 3], dtype=torch.int32), torch.ones(2)),
        Sparse(torch.tensor([3, 1], dtype=torch.int32), torch.ones(2)),
        Quantised(torch.ones(18, dtype=torch.int8), -torch.ones(1)),
    ],
)
def test_a_code_that_no_client_makes_is_recognised(code: Any) -> None:
    assert invalid_code((code,), 18)


@settings(max_examples=30)
@given(vectors, st.sampled_from([EightBit(), TopK(0.3)]))
def test_a_code_of_a_client_is_valid(vector: Any, compress: Compression) -> None:
    assert invalid_code((compress.encode(torch.from_numpy(vector), KEY),), len(vector)) is None


def test_a_compression_has_a_name() -> None:
    assert parse_compression(None) is None
    assert parse_compression("8bit") == EightBit()
    assert parse_compression("topk:0.05") == TopK(0.05)


def test_error_feedback_is_refused_for_two_kinds_of_uploads() -> None:
    world = make_world()
    mime = build("mime", Setting(3, 3, 8), {})
    engine = Sequential(world.problem, world.population)
    with pytest.raises(InputError, match="has two kinds of uploads"):
        play(mime, engine, Phases(3), compress=TopK(0.1))
    play(mime, engine, Phases(3), compress=EightBit())


@pytest.mark.parametrize(
    ("compress", "sentence"),
    [("8bit", "has scales that differ between clients"), ("topk:0.1", "reveals which numbers")],
)
def test_secure_sums_are_refused_and_say_why(compress: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Experiment.of(algorithm="fedbuff", secure=True, compress=compress)


@pytest.mark.parametrize("compress", [EightBit(), TopK(0.1)])
def test_secure_sums_are_refused_in_python_as_well(compress: Compression) -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population)
    with pytest.raises(InputError, match="secure aggregation"):
        play(FedOpt(0.1, 1.0), engine, Asynchronous(6), buffer=5, aggregate=Mean(Secure()), compress=compress)
    with pytest.raises(InputError, match=r"compress is '8bit': give offbeat.EightBit\(\) or"):
        play(FedOpt(0.1, 1.0), engine, Asynchronous(6), compress="8bit")


def test_smaller_uploads_take_less_time_on_devices() -> None:
    world = make_world()
    plain = FedOpt(0.1, 1.0)
    whole, small = (
        task_work(algorithm, world.problem, world.population)
        for algorithm in (plain, Compressed(plain, EightBit(), 18))
    )
    assert (whole.up, small.up) == (8 * 18, 18 + 8)
    assert whole.down == small.down


def test_a_release_of_nobody_can_be_decoded() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    shots = play(FedOpt(0.1, 1.0), engine, Poisson(0.3), compress=EightBit())
    assert torch.isfinite(shots[-1].x).all()
