"""Whose examples are whose: iid, by label, by amount, or by natural id.

Every rule names an owner for each example and draws with keys, so equal seeds give equal parts.
Dirichlet cuts each class's examples, in their given order, at cumulative proportions, as FADAS does;
`least=0` is FADAS's rule to the letter, which may leave clients empty. Departure with a least size:
the draw is repeated up to 100 times until all clients have it; if none of the draws will do (a
small alpha, many clients), the one that lacks fewest examples is taken and the largest clients hand
over random examples, one by one, to those that are short.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offbeat import draws
from offbeat.errors import InputError, unknown
from offbeat.population.owners import IntArray, cut, parts, scatter, settle


class Partition(Protocol):
    """A rule that gives each client the indices of its examples; `str` writes it as it is parsed."""

    def split(
        self, labels: IntArray, clients: int, seed: int, groups: IntArray | None = None
    ) -> list[IntArray]: ...


@dataclass(frozen=True)
class Iid:
    """Equal shares of shuffled examples."""

    def split(
        self, labels: IntArray, clients: int, seed: int, groups: IntArray | None = None
    ) -> list[IntArray]:
        _check(len(labels), clients, 1)
        order = draws.generator(seed, "partition").permutation(len(labels))
        return parts(order % clients, clients)

    def __str__(self) -> str:
        return "iid"


@dataclass(frozen=True)
class Dirichlet:
    """Each class is spread over the clients in proportions from Dirichlet(alpha, ..., alpha)."""

    alpha: float
    least: int = 1

    def __post_init__(self) -> None:
        _check_skew("dirichlet", self.alpha, self.least)

    def split(
        self, labels: IntArray, clients: int, seed: int, groups: IntArray | None = None
    ) -> list[IntArray]:
        _check(len(labels), clients, self.least)
        order = np.argsort(labels, kind="stable")
        counts = np.unique(labels, return_counts=True)[1]

        def owners(attempt: int) -> IntArray:
            rng = draws.generator(seed, "partition", attempt)
            shares = rng.dirichlet(np.full(clients, self.alpha), size=len(counts))
            spread = [cut(share, count) for share, count in zip(shares, counts, strict=True)]
            return scatter(order, np.concatenate(spread))

        return parts(settle(owners, clients, self.least, seed), clients)

    def __str__(self) -> str:
        return f"dirichlet:{_written(self.alpha, self.least)}"


@dataclass(frozen=True)
class Quantity:
    """Shuffled examples in amounts from Dirichlet(alpha, ..., alpha)."""

    alpha: float
    least: int = 1

    def __post_init__(self) -> None:
        _check_skew("quantity", self.alpha, self.least)

    def split(
        self, labels: IntArray, clients: int, seed: int, groups: IntArray | None = None
    ) -> list[IntArray]:
        _check(len(labels), clients, self.least)

        def owners(attempt: int) -> IntArray:
            rng = draws.generator(seed, "partition", attempt)
            spread = cut(rng.dirichlet(np.full(clients, self.alpha)), len(labels))
            return scatter(rng.permutation(len(labels)), spread)

        return parts(settle(owners, clients, self.least, seed), clients)

    def __str__(self) -> str:
        return f"quantity:{_written(self.alpha, self.least)}"


@dataclass(frozen=True)
class Shards:
    """Examples sorted by label and cut into equal shards, of which each client is dealt a few."""

    per_client: int = 2

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise InputError(f"shards per client is {self.per_client}: give at least 1.")

    def split(
        self, labels: IntArray, clients: int, seed: int, groups: IntArray | None = None
    ) -> list[IntArray]:
        _check(len(labels), clients, self.per_client)
        shards = clients * self.per_client
        shard = np.arange(len(labels)) * shards // len(labels)
        dealt = draws.generator(seed, "partition").permutation(shards) // self.per_client
        return parts(scatter(np.argsort(labels, kind="stable"), dealt[shard]), clients)

    def __str__(self) -> str:
        return f"shards:{self.per_client}"


@dataclass(frozen=True)
class Natural:
    """Each natural id is a client; fewer clients than ids take a random sample of the ids."""

    def split(
        self, labels: IntArray, clients: int, seed: int, groups: IntArray | None = None
    ) -> list[IntArray]:
        if groups is None:
            raise InputError(
                "these examples have no natural ids: choose another partition, such as dirichlet:0.5."
            )
        if len(groups) != len(labels):
            raise InputError(
                f"{len(groups)} natural ids for {len(labels)} examples: give one for each example."
            )
        ids, numbers = np.unique(groups, return_inverse=True)
        _check(len(labels), clients, 1)
        if clients > len(ids):
            raise InputError(
                f"there are {clients} clients but only {len(ids)} natural ids: use at most {len(ids)}."
            )
        chosen = draws.generator(seed, "partition").choice(len(ids), clients, replace=False)
        by_id = parts(numbers.reshape(-1), len(ids))
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
            case "quantity", [alpha, *least] if len(least) <= 1:
                return Quantity(float(alpha), *map(int, least))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"the partition '{text}' has a value that is not a number: {_FORMS}.") from error
    if name not in _NAMES:
        raise unknown("partition", name, _NAMES)
    raise InputError(f"the partition '{text}' has too few or too many values: {_FORMS}.")


_NAMES = ("dirichlet", "iid", "natural", "quantity", "shards")
_FORMS = "write iid, dirichlet:0.5, dirichlet:0.5:20 (least size), quantity:0.5, shards:2 or natural"


def _check(examples: int, clients: int, least: int) -> None:
    if clients < 1:
        raise InputError(f"the number of clients is {clients}: give at least 1.")
    if examples < clients * max(1, least):
        each = "" if least <= 1 else f" with at least {least} each"
        raise InputError(f"{examples} examples are too few for {clients} clients{each}: use fewer clients.")


def _check_skew(name: str, alpha: float, least: int) -> None:
    if not (math.isfinite(alpha) and alpha > 0):
        raise InputError(f"alpha of {name} is {alpha}: give a number above 0.")
    if least < 0:
        raise InputError(f"the least size of {name} is {least}: give 0 or more.")


def _written(alpha: float, least: int) -> str:
    return f"{alpha!r}".removesuffix(".0") + ("" if least == 1 else f":{least}")
