import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import draws
from offbeat.data.population import Epochs, Steps
from offbeat.errors import InputError


def rng(number=0):
    return draws.generator(0, "test", number)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 40))
def test_steps_are_exactly_as_many_and_as_large_as_asked_and_use_examples_evenly(count, size, examples):
    batches = Steps(count, size).draw(examples, rng())
    assert [len(batch) for batch in batches] == [size] * count
    used = np.bincount(np.concatenate(batches), minlength=examples)
    assert len(used) == examples
    assert used.max() - used.min() <= 1


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 40))
def test_epochs_use_every_example_once_a_pass_and_keep_the_last_partial_batch(count, size, examples):
    batches = Epochs(count, size).draw(examples, rng())
    per_pass = -(-examples // size)
    assert len(batches) == count * per_pass
    for start in range(0, len(batches), per_pass):
        one = batches[start : start + per_pass]
        assert [len(batch) for batch in one[:-1]] == [size] * (per_pass - 1)
        assert sorted(np.concatenate(one)) == list(range(examples))


@pytest.mark.parametrize("work", [Steps(5, 4), Epochs(1, 4), Epochs(2, 4)])
def test_equal_keys_give_equal_batches_and_others_do_not(work):
    first, again, other = (np.concatenate(work.draw(20, rng(number))) for number in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_each_pass_is_shuffled_anew():
    for work in (Steps(2, 50), Epochs(2, 50)):
        first, second = work.draw(50, rng())
        assert sorted(first) == sorted(second)
        assert not np.array_equal(first, second)


@pytest.mark.parametrize("work", [Steps(1, 1), Epochs(1, 1)])
def test_every_example_is_as_likely_to_come_first(work):
    counts = np.bincount([work.draw(4, rng(number))[0][0] for number in range(2000)], minlength=4)
    chi_squared = ((counts - 500) ** 2 / 500).sum()
    assert chi_squared < 16.3  # 0.999 quantile with 3 degrees of freedom


@pytest.mark.parametrize("work", [Steps, Epochs])
def test_no_batches_or_empty_batches_are_refused(work):
    with pytest.raises(InputError, match="give a whole number of at least 1"):
        work(0, 5)
    with pytest.raises(InputError, match="batch size is 0"):
        work(5, 0)
