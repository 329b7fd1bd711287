"""Correlated noise: sensitivities against all patterns, streams against their matrices."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import InputError
from offbeat.privacy import correlated
from offbeat.privacy.correlated import (
    BandedNoise,
    BltNoise,
    IndependentNoise,
    TreeNoise,
    parse_correlation,
)

KEY = bytes(range(32))
SHAPES = [
    IndependentNoise(),
    TreeNoise(),
    BandedNoise(1),
    BandedNoise(4),
    BltNoise(1000),
    BltNoise(10000),
]


def identity(steps):
    return np.eye(steps)


def nodes(steps):
    """Rows of ones over [i 2^l, (i + 1) 2^l), for even i, as far as they end within the steps."""
    rows = []
    for level in range(steps.bit_length()):
        for start in range(0, steps - 2**level + 1, 2 ** (level + 1)):
            row = np.zeros(steps)
            row[start : start + 2**level] = 1
            rows.append(row)
    return np.array(rows)


def square_root(bands):
    """Lower triangular, from the binomial series of (1 - x)^(-1/2)."""

    def matrix(steps):
        c = [1.0]
        for k in range(1, bands):
            c.append(c[-1] * (k - 0.5) / k)
        return sum(c[k] * np.eye(steps, k=-k) for k in range(min(bands, steps)))

    return matrix


MATRICES = [(IndependentNoise(), identity), (TreeNoise(), nodes)] + [
    (BandedNoise(b), square_root(b)) for b in (1, 2, 3, 5, 9, 64)
]


def buffered(shape):
    """Entry by entry, from the definition: 1 on the diagonal, then sums of scale * decay^(i - j - 1)."""

    def matrix(steps):
        decays, scales = correlated._BLT_FACTORS[shape.steps]
        c = np.eye(steps)
        for i in range(steps):
            for j in range(i):
                c[i, j] = sum(w * d ** (i - j - 1) for d, w in zip(decays, scales, strict=True))
        return c

    return matrix


MATRICES += [(BltNoise(steps), buffered(BltNoise(steps))) for steps in (1000, 10000)]
MATRIX = {shape.name: matrix for shape, matrix in MATRICES}


def patterns(steps, most, apart):
    for count in range(1, min(most, steps) + 1):
        for chosen in itertools.combinations(range(steps), count):
            if all(b - a >= apart for a, b in itertools.pairwise(chosen)):
                yield chosen


def brute_force(matrix, most, apart):
    return max(np.linalg.norm(matrix[:, chosen].sum(1)) for chosen in patterns(matrix.shape[1], most, apart))


@pytest.mark.parametrize(("shape", "matrix"), MATRICES, ids=lambda value: getattr(value, "name", ""))
def test_no_pattern_of_contributions_exceeds_the_sensitivity_and_one_reaches_it(shape, matrix):
    for steps, most, apart in itertools.product([1, 2, 5, 7, 8, 11, 12], [1, 2, 3, 4], [1, 2, 3, 4, 5, 8]):
        found = shape.sensitivity(steps, most, apart)
        worst = brute_force(matrix(steps), most, apart)
        assert found >= worst - 1e-12
        if not (isinstance(shape, TreeNoise) and apart in (3, 5)):  # an upper bound there
            assert found == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize(("shape", "matrix"), MATRICES, ids=lambda value: getattr(value, "name", ""))
def test_contributions_of_any_direction_and_length_stay_below_the_sensitivity(shape, matrix):
    draws = np.random.default_rng(0)
    for chosen in patterns(9, 3, 2):
        moved = np.zeros((9, 4))
        vectors = draws.normal(size=(len(chosen), 4))
        moved[list(chosen)] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        assert np.linalg.norm(matrix(9) @ moved) <= shape.sensitivity(9, 3, 2) + 1e-12


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_without_a_distance_all_contributions_may_fall_on_one_step(shape):
    assert shape.sensitivity(11, 3, 0) == pytest.approx(3 * shape.sensitivity(11, 1, 1))
    with pytest.raises(InputError, match="unbounded participation has no sensitivity"):
        shape.sensitivity(11, None, 0)
    with pytest.raises(InputError, match="no sensitivity of 11 steps with 0"):
        shape.sensitivity(11, 0, 1)


@given(
    st.sampled_from(SHAPES), st.integers(1, 300), st.one_of(st.none(), st.integers(1, 9)), st.integers(1, 40)
)
def test_sensitivity_rises_with_steps_and_contributions_and_falls_with_distance(shape, steps, most, apart):
    here = shape.sensitivity(steps, most, apart)
    assert shape.sensitivity(steps + 1, most, apart) >= here - 1e-12
    assert shape.sensitivity(steps, most, apart + 1) <= here + 1e-12
    if most is not None:
        assert shape.sensitivity(steps, most + 1, apart) >= here - 1e-12


def test_bands_that_do_not_meet_add_up_as_independent_contributions():
    norm = np.linalg.norm(BandedNoise(8).coefficients)
    assert BandedNoise(8).sensitivity(500, 5, 8) == pytest.approx(np.sqrt(5) * norm)
    assert BandedNoise(8).sensitivity(500, 5, 7) > np.sqrt(5) * norm


def test_a_maintained_library_finds_the_same_sensitivities():
    # toeplitz.minsep_sensitivity_squared of jax-privacy 2.0.0: 500 steps, 5 contributions
    for bands, apart, expected in (
        (8, 8, 2.931194),
        (20, 20, 3.174815),
        (32, 20, 3.798964),
        (20, 1, 5.816665),
    ):
        assert BandedNoise(bands).sensitivity(500, 5, apart) == pytest.approx(expected, abs=1e-6)


def test_all_bands_squared_are_the_prefix_sums():
    c = square_root(12)(12)
    assert np.allclose(BandedNoise(12).coefficients, c[:, 0])
    assert np.allclose(c @ c, np.tri(12))


def stream_matrix(shape, steps):
    """The matrix from independent noise to what is drawn: prefixes by nodes for the tree, C^-1 for others."""
    if not isinstance(shape, TreeNoise):
        return np.linalg.inv(MATRIX[shape.name](steps))
    rows, prefixes = nodes(steps), []
    for prefix in range(1, steps + 1):
        begin, row = 0, np.zeros(len(rows))
        for level in reversed(range(prefix.bit_length())):
            if prefix >> level & 1:
                here = np.zeros(steps)
                here[begin : begin + 2**level] = 1
                row[[np.array_equal(each, here) for each in rows]] = 1
                begin += 2**level
        prefixes.append(row)
    return np.diff(np.array(prefixes), axis=0, prepend=0.0)


STREAMS = [
    IndependentNoise(),
    TreeNoise(),
    BandedNoise(1),
    BandedNoise(3),
    BandedNoise(9),
    BltNoise(1000),
]


@pytest.mark.parametrize("shape", STREAMS, ids=lambda shape: shape.name)
def test_what_is_released_is_a_function_of_the_noised_matrix_product(shape):
    matrix = MATRIX[shape.name](13)
    assert np.allclose(stream_matrix(shape, 13) @ matrix, np.eye(13))


@pytest.mark.parametrize("shape", STREAMS, ids=lambda shape: shape.name)
def test_draws_of_a_stream_have_the_covariance_of_its_matrix(shape):
    steps, size = 13, 40_000
    stream, like = shape.open(KEY), torch.zeros(size, dtype=torch.float64)
    drawn = torch.stack([stream.draw(step, 0, like) for step in range(steps)]).numpy()
    matrix = stream_matrix(shape, steps)
    expected = matrix @ matrix.T
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs(drawn @ drawn.T / size - expected).max() < 5 * (2 / size) ** 0.5 * scale.max()
    assert np.abs(drawn.mean(1)).max() < 5 * np.sqrt(np.diag(expected).max() / size)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("cut", [0, 1, 3, 9])
@pytest.mark.parametrize("marked", [False, True])
def test_a_stream_resumed_after_any_step_draws_the_same_noise(shape, cut, marked):
    likes = [torch.zeros(5), torch.zeros(2, 3, dtype=torch.float64)]

    def draw(stream, steps):
        return [
            stream.draw(step, field, like, bytes([step]) * marked)
            for step in steps
            for field, like in enumerate(likes)
        ]

    whole = draw(shape.open(KEY), range(12))
    stream = shape.open(KEY)
    first = draw(stream, range(cut))
    resumed = shape.open(KEY)
    resumed.load(stream.save())
    for got, expected in zip(first + draw(resumed, range(cut, 12)), whole, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_fields_and_keys_have_noise_of_their_own(shape):
    like = torch.zeros(2000, dtype=torch.float64)
    stream, other = shape.open(KEY), shape.open(bytes(32))
    a, b, c = stream.draw(0, 0, like), stream.draw(0, 1, like), other.draw(0, 0, like)
    for x, y in itertools.combinations([a, b, c], 2):
        assert abs(float(x @ y)) / 2000 < 5 / 2000**0.5


def test_the_tree_draws_no_noise_twice_but_to_take_it_back():
    stream, like = TreeNoise().open(KEY), torch.zeros(3, dtype=torch.float64)
    prefix = sum(stream.draw(step, 0, like) for step in range(8))
    assert torch.allclose(prefix, stream._node(8, 3, 0, like))  # one node is left of eight steps


def test_the_tree_takes_back_what_it_drew_for_marked_sums_and_keeps_one_mark_a_node():
    stream, like = TreeNoise().open(KEY), torch.zeros(3, dtype=torch.float64)
    prefix = sum(stream.draw(step, 0, like, bytes([step])) for step in range(8))
    assert torch.allclose(prefix, stream._node(8, 3, 0, like))
    for step in range(8, 200):
        stream.draw(step, 0, like, bytes([step]))
        assert len(stream.save().facts["marks"]) <= 1 + step.bit_count()


def test_banded_noise_out_of_order_is_refused():
    stream, like = BandedNoise(3).open(KEY), torch.zeros(2)
    stream.draw(0, 0, like)
    with pytest.raises(ValueError, match="step 1 is next, not 2"):
        stream.draw(2, 0, like)
    with pytest.raises(ValueError, match="step 1 is next, not 0"):
        stream.draw(0, 0, like)


def test_bands_below_one_and_hopeless_sensitivities_are_refused():
    with pytest.raises(InputError, match="give at least 1"):
        BandedNoise(0)
    with pytest.raises(InputError, match="takes too long"):
        TreeNoise().sensitivity(10**6, 10**5, 1)


def test_at_equal_privacy_correlated_noise_makes_prefix_sums_less_noisy():
    steps, most, apart = 256, 4, 64

    def error(shape):
        noise = np.cumsum(stream_matrix(shape, steps), axis=0)
        return shape.sensitivity(steps, most, apart) ** 2 * (noise**2).sum()

    independent = error(IndependentNoise())
    assert error(TreeNoise()) < 0.5 * independent
    assert error(BandedNoise(64)) < 0.25 * independent


def test_the_factors_of_blt_noise_fall_as_the_sensitivity_needs():
    for steps in (1000, 10000):
        column = BltNoise(steps).column(20_000)
        assert (column > 0).all()
        assert (np.diff(column) <= 0).all()


def test_blt_noise_is_nearly_as_good_as_banded_noise_with_few_buffers(tmp_path):
    program = Path(__file__).parents[2] / "benchmarks" / "correlated_noise.py"
    subprocess.run(
        [sys.executable, program, "--json", tmp_path / "out.json"], check=True, capture_output=True
    )
    rows = json.loads((tmp_path / "out.json").read_text())
    for steps in (1000, 10000):
        found = {row["noise"]: row for row in rows if row["steps"] == steps}
        own, banded = found[f"blt:{steps}"], found[f"banded:{steps // 5}"]
        assert own["rms_prefix_error"] < 1.05 * banded["rms_prefix_error"]
        assert own["rms_prefix_error"] < 0.5 * found["tree"]["rms_prefix_error"]
        assert (own["vectors"], banded["vectors"]) == (3, steps // 5 - 1)
    # by the matrices, for a run that is short enough for them
    noise = np.cumsum(stream_matrix(BltNoise(), 60), axis=0)
    direct = np.sqrt((noise**2).sum(1).mean())
    impulse = np.linalg.inv(buffered(BltNoise())(60))[:, 0]
    assert direct == pytest.approx(np.sqrt(np.mean(np.cumsum(np.cumsum(impulse) ** 2))))


def test_blt_noise_by_name():
    assert parse_correlation("blt") == BltNoise(1000)
    assert parse_correlation("blt:10000") == BltNoise(10000)
    for text, says in (("blt:7", "known for 1000 and 10000"), ("blt:x", "such as blt:1000")):
        with pytest.raises(InputError, match=says):
            parse_correlation(text)
