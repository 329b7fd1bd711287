"""The partition of examples over clients: iid, by label, by amount, by natural id, or computed lazily.

Every rule assigns each example to a client with keyed draws, so equal seeds give equal parts.
Dirichlet cuts each class's examples, in their given order, at cumulative proportions, as FADAS does;
`least=0` is exactly FADAS's rule, which may leave clients empty. Departure with a least size: the draw
is repeated up to 100 times until all clients have enough; if no draw succeeds (a small alpha, many
clients), the one that lacks fewest examples is taken, and the largest clients give random examples, one
by one, to those with too few.

Lazy parts are computed on request, so that a population of any size takes no memory; there, clients may
share examples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat import draws
from offbeat.errors import InputError, check_whole, is_number, unknown_name

IntArray = NDArray[np.int64]
MAX_DRAWS = 100


def parts_by_owner(owners: IntArray, clients: int) -> list[IntArray]:
    """The indices that each client owns, in order."""
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=clients))
    return np.split(order, ends[:-1])


def cut_by_shares(shares: NDArray[np.float64], count: int) -> IntArray:
    """The owner of each of `count` examples in a row, cut at cumulative shares."""
    cuts = (np.cumsum(shares[:-1]) * count).astype(np.int64)
    return np.searchsorted(cuts, np.arange(count), side="right")


def scatter(order: IntArray, values: IntArray) -> IntArray:
    """An array that has `values` at the positions `order`."""
    placed = np.empty_like(values)
    placed[order] = values
    return placed


def cut_classes(labels: IntArray, shares: NDArray[np.float64]) -> IntArray:
    """The owner of each example, where `shares[k]` are the clients' shares of the k-th class."""
    counts = np.unique(labels, return_counts=True)[1]
    spread = [cut_by_shares(share, count) for share, count in zip(shares, counts, strict=True)]
    return scatter(np.argsort(labels, kind="stable"), np.concatenate(spread))


def split_alike(labels: IntArray, parts: Sequence[IntArray], test_labels: IntArray) -> list[IntArray]:
    """Divide test examples so that each client has its share of every class of the training examples."""
    shares = []
    for label in np.unique(test_labels):
        counts = np.array([np.count_nonzero(labels[part] == label) for part in parts], float)
        shares.append(counts / counts.sum() if counts.any() else np.full(len(parts), 1 / len(parts)))
    return parts_by_owner(cut_classes(test_labels, np.array(shares)), len(parts))


def draw_owners(draw: Callable[[int], IntArray], clients: int, least: int, seed: int) -> IntArray:
    """The first draw that gives each client `least` examples, or the closest draw, repaired."""
    lacks = []
    for attempt in range(MAX_DRAWS):
        owners = draw(attempt)
        sizes = np.bincount(owners, minlength=clients)
        lacks.append(np.maximum(least - sizes, 0).sum())
        if lacks[-1] == 0:
            return owners
    nearest = draw(int(np.argmin(lacks)))
    return _repaired(nearest, clients, least, draws.generator(seed, "partition repair"))


def _repaired(owners: IntArray, clients: int, least: int, rng: np.random.Generator) -> IntArray:
    held = [list(part) for part in parts_by_owner(owners, clients)]
    sizes = np.array([len(part) for part in held])
    repaired = owners.copy()
    for client in np.flatnonzero(sizes < least):
        while sizes[client] < least:
            giver = int(np.argmax(sizes))
            example = held[giver].pop(int(rng.integers(sizes[giver])))
            repaired[example] = client
            sizes[giver] -= 1
            sizes[client] += 1
    return repaired


class Partition(Protocol):
    """A rule that gives each client the indices of its examples; `str` writes it as it is parsed."""

    def split(
        self, labels: IntArray, clients: int, seed: int = 0, groups: IntArray | None = None
    ) -> list[IntArray]:
        """The indices of the examples of each client.

        Args:
            labels: The label of each example.
            clients: The number of clients.
            seed: The seed of the partition.
            groups: The natural client id of each example, for `Natural`.
        """
        ...


@dataclass(frozen=True)
class Iid:
    """Equal shares of shuffled examples."""

    def split(
        self, labels: IntArray, clients: int, seed: int = 0, groups: IntArray | None = None
    ) -> list[IntArray]:
        _check_counts(len(labels), clients, 1)
        order = draws.generator(seed, "partition").permutation(len(labels))
        return parts_by_owner(order % clients, clients)

    def __str__(self) -> str:
        return "iid"


@dataclass(frozen=True)
class Dirichlet:
    """Each class is spread over the clients in proportions from Dirichlet(alpha, ..., alpha).

    Attributes:
        alpha: The concentration: the smaller, the more uneven are the labels of a client.
        least: The least number of examples of a client.
    """

    alpha: float
    least: int = 1

    def __post_init__(self) -> None:
        _check_skew("dirichlet", self.alpha, self.least)

    def split(
        self, labels: IntArray, clients: int, seed: int = 0, groups: IntArray | None = None
    ) -> list[IntArray]:
        _check_counts(len(labels), clients, self.least)
        classes = len(np.unique(labels))

        def owners(attempt: int) -> IntArray:
            rng = draws.generator(seed, "partition", attempt)
            return cut_classes(labels, rng.dirichlet(np.full(clients, self.alpha), size=classes))

        return parts_by_owner(draw_owners(owners, clients, self.least, seed), clients)

    def __str__(self) -> str:
        return f"dirichlet:{_format_skew(self.alpha, self.least)}"


@dataclass(frozen=True)
class FadasScript:
    """The split of FADAS's published scripts: Dirichlet(alpha) drawn by NumPy's legacy generator.

    With the scripts' seed, 42, these are the clients of the paper's experiments. Clients may be empty.
    """

    alpha: float

    def __post_init__(self) -> None:
        _check_skew("fadas-script", self.alpha, 0)

    def split(
        self, labels: IntArray, clients: int, seed: int = 0, groups: IntArray | None = None
    ) -> list[IntArray]:
        _check_counts(len(labels), clients, 0)
        shares = np.random.RandomState(seed).dirichlet([self.alpha] * clients, len(np.unique(labels)))
        return parts_by_owner(cut_classes(labels, shares), clients)

    def __str__(self) -> str:
        return f"fadas-script:{self.alpha:g}"


@dataclass(frozen=True)
class Quantity:
    """Shuffled examples in amounts from Dirichlet(alpha, ..., alpha).

    Attributes:
        alpha: The concentration: the smaller, the more uneven are the amounts.
        least: The least number of examples of a client.
    """

    alpha: float
    least: int = 1

    def __post_init__(self) -> None:
        _check_skew("quantity", self.alpha, self.least)

    def split(
        self, labels: IntArray, clients: int, seed: int = 0, groups: IntArray | None = None
    ) -> list[IntArray]:
        _check_counts(len(labels), clients, self.least)

        def owners(attempt: int) -> IntArray:
            rng = draws.generator(seed, "partition", attempt)
            spread = cut_by_shares(rng.dirichlet(np.full(clients, self.alpha)), len(labels))
            return scatter(rng.permutation(len(labels)), spread)

        return parts_by_owner(draw_owners(owners, clients, self.least, seed), clients)

    def __str__(self) -> str:
        return f"quantity:{_format_skew(self.alpha, self.least)}"


@dataclass(frozen=True)
class Shards:
    """Examples sorted by label and cut into equal shards, of which each client is dealt a few.

    Attributes:
        per_client: The number of shards of each client.
    """

    per_client: int = 2

    def __post_init__(self) -> None:
        check_whole("the number of shards per client", self.per_client)

    def split(
        self, labels: IntArray, clients: int, seed: int = 0, groups: IntArray | None = None
    ) -> list[IntArray]:
        _check_counts(len(labels), clients, self.per_client)
        shards = clients * self.per_client
        shard = np.arange(len(labels)) * shards // len(labels)
        dealt = draws.generator(seed, "partition").permutation(shards) // self.per_client
        return parts_by_owner(scatter(np.argsort(labels, kind="stable"), dealt[shard]), clients)

    def __str__(self) -> str:
        return f"shards:{self.per_client}"


@dataclass(frozen=True)
class Natural:
    """Each natural id is a client; fewer clients than ids take a random sample of the ids.

    `Natural().split(ids)` gives one client for each id.
    """

    def split(
        self,
        labels: NDArray[Any],
        clients: int | None = None,
        seed: int = 0,
        groups: NDArray[Any] | None = None,
    ) -> list[IntArray]:
        if groups is None and clients is None:
            groups = labels
        if groups is None:
            raise InputError(
                "the partition natural needs the natural client id of each example: pass them as groups=, or "
                "choose another partition, such as dirichlet:0.5."
            )
        if len(groups) != len(labels):
            raise InputError(
                f"{len(groups)} natural ids for {len(labels)} examples: give one for each example."
            )
        ids, numbers = np.unique(groups, return_inverse=True)
        clients = len(ids) if clients is None else clients
        _check_counts(len(labels), clients, 1)
        if clients > len(ids):
            raise InputError(
                f"there are {clients} clients but only {len(ids)} natural ids: use at most {len(ids)}."
            )
        chosen = draws.generator(seed, "partition").choice(len(ids), clients, replace=False)
        by_id = parts_by_owner(numbers.reshape(-1), len(ids))
        return [by_id[number] for number in np.sort(chosen)]

    def __str__(self) -> str:
        return "natural"


def parse_partition(text: str) -> Partition:
    """A partition from iid, natural, shards[:COUNT], dirichlet:ALPHA[:LEAST] or quantity:ALPHA[:LEAST]."""
    name, *values = text.split(":")
    try:
        match name, values:
            case "iid", []:
                return Iid()
            case "natural", []:
                return Natural()
            case "shards", [] | [_]:
                return Shards(*map(int, values))
            case "dirichlet", [alpha, *least] if len(least) <= 1:
                return Dirichlet(float(alpha), *map(int, least))
            case "fadas-script", [alpha]:
                return FadasScript(float(alpha))
            case "quantity", [alpha, *least] if len(least) <= 1:
                return Quantity(float(alpha), *map(int, least))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"the partition '{text}' has a value that is not a number: {_FORMS}.") from error
    if name not in _NAMES:
        raise unknown_name("partition", name, _NAMES)
    raise InputError(f"the partition '{text}' has too few or too many values: {_FORMS}.")


_NAMES = ("dirichlet", "fadas-script", "iid", "natural", "quantity", "shards")
_FORMS = "write iid, dirichlet:0.5, dirichlet:0.5:20 (least size), quantity:0.5, shards:2 or natural"


def _check_counts(examples: int, clients: int, least: int) -> None:
    check_whole("the number of clients", clients)
    if examples < clients * max(1, least):
        each = "" if least <= 1 else f" with at least {least} each"
        raise InputError(f"{examples} examples are too few for {clients} clients{each}: use fewer clients.")


def _check_skew(name: str, alpha: float, least: int) -> None:
    if not (is_number(alpha) and math.isfinite(alpha) and alpha > 0):
        raise InputError(f"alpha of {name} is {alpha!r}: give a number above 0.")
    check_whole(f"the least size of {name}", least, 0)


def _format_skew(alpha: float, least: int) -> str:
    return f"{alpha!r}".removesuffix(".0") + ("" if least == 1 else f":{least}")


@dataclass(frozen=True)
class LazyRandom:
    """Each client has `least` to `most` distinct examples, chosen by a keyed draw."""

    clients: int
    least: int
    most: int
    examples: int  # of the data
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise InputError(f"the number of clients is {self.clients}: give at least 1.")
        if not 1 <= self.most <= self.examples:
            raise InputError(
                f"a client cannot have {self.most} of {self.examples} examples: give 1 to {self.examples}."
            )
        if not 1 <= self.least <= self.most:
            raise InputError(
                f"clients have from {self.least} to {self.most} examples: give 1 <= least <= most."
            )

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> NDArray[np.int64]:
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} of {self.clients}")
        rng = draws.generator(self.seed, "part", client)
        size = rng.integers(self.least, self.most, endpoint=True)
        return rng.choice(self.examples, size, replace=False, shuffle=False)
