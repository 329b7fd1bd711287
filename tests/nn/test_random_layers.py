"""Dropout and random crops, drawn by a key."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat import Asynchronous, FedOpt, Problem, Sequential, Vectorised
from offbeat.data.population import Examples, Population, Steps
from offbeat.nn.layers import KeyedDropout, RandomCropFlip, dropout_keys, with_keyed_dropout
from worlds import make_world, play


def layer(p: float, key: int = 7) -> KeyedDropout:
    made = with_keyed_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(p)))[1].train()
    assert isinstance(made, KeyedDropout)
    made.key.fill_(key)
    return made


@given(st.sampled_from([0.05, 0.25, 0.5, 0.9]), st.integers(0, 2**60))
def test_as_many_are_dropped_as_should_be_and_the_rest_keeps_the_mean(p: float, key: int) -> None:
    size = 20_000
    outputs = layer(p, key)(torch.ones(size // 100, 100))
    dropped = (outputs == 0).double().mean().item()
    assert abs(dropped - p) < 6 * (p * (1 - p) / size) ** 0.5
    torch.testing.assert_close(outputs[outputs != 0], torch.full_like(outputs[outputs != 0], 1 / (1 - p)))


def test_neighbouring_keys_layers_and_places_look_independent() -> None:
    size = 20_000
    once, again, beside = (layer(0.5, key)(torch.ones(size)) == 0 for key in (1, 2, 1 + 0x632BE5AB))
    for one, other in ((once, again), (once, beside), (once[1:], once[:-1])):
        both = (one == other).double().mean().item()
        assert abs(both - 0.5) < 6 * 0.5 / size**0.5


def test_each_call_draws_anew_and_the_same_key_draws_alike() -> None:
    first, second = layer(0.5), layer(0.5)
    inputs = torch.ones(1000)
    one, other = first(inputs), first(inputs)
    assert not torch.equal(one, other)
    assert torch.equal(one, second(inputs))
    assert torch.equal(other, second(inputs))


def test_nothing_and_everything_can_be_dropped_and_evaluation_drops_nothing() -> None:
    inputs = torch.randn(50)
    assert torch.equal(layer(0.0)(inputs), inputs)
    assert torch.equal(layer(1.0)(inputs), torch.zeros(50))
    assert torch.equal(layer(0.5).eval()(inputs), inputs)


def test_keys_are_not_statistics_and_the_module_taken_away_is_plain() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    problem = Problem(module, nn.functional.cross_entropy)
    x, statistics = problem.initial()
    assert statistics == {}
    assert type(problem.module(x)[1]) is nn.Dropout  # type: ignore[index]
    assert type(module[1]) is nn.Dropout
    assert dropout_keys(with_keyed_dropout(nn.Sequential(nn.Dropout(0.5)))) == ["0.key"]


def test_clients_with_dropout_are_mapped_and_nothing_is_said(caplog) -> None:  # type: ignore[no-untyped-def]
    world = make_world(module=nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.4), nn.Linear(6, 3)).double())
    play(FedOpt(0.1, 1.0), Vectorised(world.problem, world.population), Asynchronous(5))
    assert caplog.records == []


def test_a_crop_is_a_window_of_the_padded_image_and_every_window_is_as_likely() -> None:
    """Each of the 25 windows and its mirror image, found by trying all of them."""
    fill = torch.tensor([-1.0, -2.0])
    images = torch.arange(2 * 6 * 6.0).reshape(1, 2, 6, 6).repeat(4000, 1, 1, 1)
    outputs = RandomCropFlip(fill, padding=2).train()(images)
    padded = fill.reshape(2, 1, 1).repeat(1, 10, 10)
    padded[:, 2:8, 2:8] = images[0]
    windows = {
        (down, right, flip): window.flip(-1) if flip else window
        for down in range(5)
        for right in range(5)
        for flip in (False, True)
        for window in [padded[:, down : down + 6, right : right + 6]]
    }
    names = {window.numpy().tobytes(): name for name, window in windows.items()}
    counts = Counter(names[output.numpy().tobytes()] for output in outputs)
    assert len(counts) == 50
    expected = 4000 / 50
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 49 + 6 * (2 * 49) ** 0.5


def test_crops_are_drawn_anew_by_each_call_and_not_in_evaluation() -> None:
    images = torch.randn(64, 1, 8, 8)
    first, second = RandomCropFlip(torch.zeros(1)).train(), RandomCropFlip(torch.zeros(1)).train()
    one, other = first(images), first(images)
    assert not torch.equal(one, other)
    assert torch.equal(one, second(images))
    assert torch.equal(other, second(images))
    assert torch.equal(first.eval()(images), images)


def test_engines_crop_alike_and_keys_are_not_statistics() -> None:
    generator = torch.Generator().manual_seed(0)
    data = Examples(torch.randn(40, 1, 6, 6, generator=generator, dtype=torch.float64), torch.arange(40) % 3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            RandomCropFlip(torch.zeros(1, dtype=torch.float64), 2), nn.Flatten(), nn.Linear(36, 3)
        )
    problem = Problem(module.double(), nn.functional.cross_entropy)
    assert problem.initial()[1] == {}
    population = Population(data, [torch.arange(k, 40, 4).numpy() for k in range(4)], Steps(3, 5))
    plain, mapped, still = (
        play(FedOpt(0.1, 1.0), engine, Asynchronous(3), buffer=2)[-1].x
        for engine in (
            Sequential(problem, population),
            Vectorised(problem, population),
            Sequential(Problem(module[1:], nn.functional.cross_entropy), population),
        )
    )
    torch.testing.assert_close(plain, mapped, rtol=0, atol=1e-12)
    assert (plain - still).abs().max() > 1e-3
