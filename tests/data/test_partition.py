import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data.partition import Dirichlet, FadasScript, Iid, Natural, Quantity, Shards, parse_partition
from offbeat.errors import InputError

RULES = (
    Iid(),
    Dirichlet(0.3),
    Dirichlet(0.05, 0),
    Dirichlet(1.0, 3),
    Quantity(0.4),
    Shards(2),
    Natural(),
    FadasScript(0.5),
)
LABELS = np.random.default_rng(0).integers(0, 10, 1437)


@given(
    st.sampled_from(RULES),
    st.lists(st.integers(0, 4), min_size=24, max_size=60),
    st.integers(1, 8),
    st.integers(0, 3),
)
@settings(max_examples=150)
def test_every_rule_gives_each_example_to_exactly_one_client(rule, labels, clients, seed):
    groups = np.arange(len(labels)) % clients
    parts = rule.split(np.array(labels), clients, seed, groups)
    assert len(parts) == clients
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equal_seeds_give_equal_parts_and_others_do_not(rule):
    def split(seed):
        return rule.split(LABELS, 20, seed, np.arange(len(LABELS)) % 40)

    assert all(np.array_equal(a, b) for a, b in zip(split(1), split(1), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(split(1), split(2), strict=True))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_partition_reads_what_it_writes(rule):
    assert parse_partition(str(rule)) == rule


def test_partitions_are_written_as_on_the_command_line():
    assert parse_partition("dirichlet:0.5") == Dirichlet(0.5, 1)
    assert parse_partition("dirichlet:0.5:20") == Dirichlet(0.5, 20)
    assert parse_partition("quantity:2:0") == Quantity(2.0, 0)
    assert parse_partition("shards") == Shards(2)
    assert str(Dirichlet(1.0)) == "dirichlet:1"


def test_iid_parts_differ_by_one_example_at_most():
    sizes = [len(part) for part in Iid().split(LABELS, 100, 0)]
    assert max(sizes) - min(sizes) == 1


@pytest.mark.parametrize("alpha", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("least", [1, 5, 14])
def test_dirichlet_keeps_its_least_size_for_any_alpha(alpha, least):
    parts = Dirichlet(alpha, least).split(LABELS, 100, 0)
    assert min(len(part) for part in parts) >= least
    assert sorted(np.concatenate(parts)) == list(range(len(LABELS)))


def test_a_draw_that_already_has_the_least_size_is_left_as_it_is():
    free, guarded = (Dirichlet(5.0, least).split(LABELS, 10, 3) for least in (0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(free, guarded, strict=True))


def test_dirichlet_cuts_each_class_in_order():
    parts = Dirichlet(1.0, 0).split(LABELS, 7, 0)
    for label in range(10):
        owned = np.concatenate([part[LABELS[part] == label] for part in parts])
        assert np.array_equal(owned, np.flatnonzero(np.equal(LABELS, label)))


def test_dirichlet_shares_have_the_mean_and_variance_of_their_law():
    labels, clients, alpha = np.zeros(20_000, np.int64), 5, 0.5
    shares = np.array(
        [[len(p) / len(labels) for p in Dirichlet(alpha, 0).split(labels, clients, s)] for s in range(400)]
    )
    mean = 1 / clients
    variance = mean * (1 - mean) / (clients * alpha + 1)
    assert shares.mean() == pytest.approx(mean)
    assert shares.var(axis=0) == pytest.approx(np.full(clients, variance), rel=0.25)


def test_dirichlet_draws_the_shares_of_each_class_by_themselves():
    """One draw for all classes would give every client the same mix of labels."""
    labels = np.repeat([0, 1], 2_000)
    own = [
        [np.bincount(labels[p], minlength=2) for p in Dirichlet(0.5, 0).split(labels, 5, s)]
        for s in range(60)
    ]
    shares = np.array(own, float).reshape(-1, 2)
    assert abs(np.corrcoef(shares.T)[0, 1]) < 0.25


def test_the_split_of_the_scripts_is_numpys_with_their_seed():
    """Written out for every class: the legacy generator's shares, cut at rounded cumulative sums."""
    np.random.seed(42)  # noqa: NPY002
    shares = np.random.dirichlet([0.3] * 6, 10)  # noqa: NPY002
    expected = [[] for _ in range(6)]
    for label, fractions in enumerate(shares):
        rows = np.flatnonzero(label == LABELS)
        start = 0
        for client, end in enumerate([*(np.cumsum(fractions)[:-1] * len(rows)).astype(int), len(rows)]):
            expected[client].extend(rows[start:end])
            start = end
    parts = FadasScript(0.3).split(LABELS, 6, 42)
    assert [sorted(part) for part in expected] == [list(part) for part in parts]


def test_smaller_alpha_means_fewer_labels_per_client():
    def labels_per_client(alpha):
        return np.mean([len(set(LABELS[part])) for part in Dirichlet(alpha).split(LABELS, 30, 0)])

    assert labels_per_client(0.05) < labels_per_client(0.5) < labels_per_client(50)


def test_shards_bound_the_labels_of_a_client():
    labels = np.repeat(np.arange(10), 60)
    parts = Shards(2).split(labels, 30, 0)
    assert {len(part) for part in parts} == {20}
    assert all(len(set(labels[part])) <= 2 for part in parts)


def test_quantity_skews_sizes_and_keeps_labels_mixed():
    labels = np.random.default_rng(1).integers(0, 2, 20_000)
    parts = Quantity(0.5).split(labels, 10, 0)
    sizes = [len(part) for part in parts]
    assert max(sizes) > 3 * min(sizes) >= 3
    assert labels[parts[int(np.argmax(sizes))]].mean() == pytest.approx(labels.mean(), abs=0.05)


def test_natural_clients_are_the_ids_or_a_sample_of_them():
    groups = np.array([7, 3, 7, 9, 3, 9, 9])
    labels = np.zeros(7, np.int64)
    parts = Natural().split(labels, 3, 0, groups)
    assert [list(part) for part in parts] == [[1, 4], [0, 2], [3, 5, 6]]
    samples = {tuple(groups[part[0]] for part in Natural().split(labels, 2, s, groups)) for s in range(40)}
    assert samples == {(3, 7), (3, 9), (7, 9)}


@pytest.mark.parametrize("rule", [Iid(), Dirichlet(0.5, 0), Quantity(1.0), Shards(1)], ids=str)
def test_fewer_examples_than_clients_is_refused(rule):
    with pytest.raises(InputError, match="3 examples are too few for 4 clients"):
        rule.split(np.zeros(3, np.int64), 4, 0)


def test_a_least_size_that_cannot_be_had_is_refused():
    with pytest.raises(InputError, match="30 examples are too few for 4 clients with at least 8 each"):
        Dirichlet(1.0, 8).split(np.zeros(30, np.int64), 4, 0)


def test_natural_needs_ids_enough_of_them_and_one_per_example():
    labels = np.zeros(4, np.int64)
    with pytest.raises(InputError, match="needs the natural client id of each example: pass them as groups="):
        Natural().split(labels, 2, 0)
    with pytest.raises(InputError, match="only 2 natural ids"):
        Natural().split(labels, 3, 0, np.array([0, 0, 1, 1]))
    with pytest.raises(InputError, match="one for each example"):
        Natural().split(labels, 2, 0, np.array([0, 1]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dirichlt:0.5", "did you mean dirichlet"),
        ("dirichlet", "too few or too many"),
        ("dirichlet:0.5:1:2", "too few or too many"),
        ("iid:1", "too few or too many"),
        ("dirichlet:half", "not a number"),
        ("dirichlet:0.5:few", "not a number"),
        ("dirichlet:0", "above 0"),
        ("quantity:nan", "above 0"),
        ("dirichlet:1:-1", "the least size of dirichlet is -1: give a whole number of at least 0"),
        ("shards:0", "at least 1"),
        ("shards:1.5", "not a number"),
    ],
)
def test_a_partition_that_cannot_be_read_says_why(text, says):
    with pytest.raises(InputError, match=says):
        parse_partition(text)
