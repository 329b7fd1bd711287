"""The uploads of clients: their fields, their clipping, and the form of an algorithm's upload, by a trial."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import AnyAlgorithm, Batch, Batches, Cohort, Rate, Vector, Visit, traits_of
from offbeat.errors import InputError
from offbeat.privacy import clipping
from offbeat.trees import Tree


class Payload(NamedTuple):
    """What is summed under differential privacy."""

    uploads: Tree
    answers: Tree = ()  # (adaptive fields,): 0.5 if the norm was within the bound, otherwise -0.5


class NoiseRequest(NamedTuple):
    """Noise that the helper of secure aggregation is to add to a sum."""

    fields: tuple[tuple[int, float], ...]  # how many numbers a field has, and the standard deviation
    max_participations: int
    min_separation: int
    key: bytes  # for a helper in the same process, which draws the noise from it
    seeded: bool  # whether that key follows from a seed, for simulations that can be repeated


class ClippingBounds(NamedTuple):
    """How clients clip their uploads, and the noise that the helper adds to their sum."""

    bounds: Mapping[str, float]
    moving: Sequence[str] = ()
    noise: NoiseRequest | None = None


class SecretShares(NamedTuple):
    """What the server receives of payloads that clients encoded for secure aggregation."""

    share: Tensor  # (tasks, length) int32: numbers mod 2^32
    sealed: Tensor  # (tasks, bytes) uint8: the helper's half
    signature: Tensor | None = None  # (tasks, bytes) uint8, where the helper asks for one
    clip: ClippingBounds | None = None  # the bounds that clients clip to; None: they do not clip


def clip_uploads(uploads: Tree, bounds: Mapping[str, float], moving: Sequence[str]) -> Payload:
    """Each field clipped to its bound, and whether those in `moving` were within it; leaves (tasks, ...)."""
    clipped, within = {}, {}
    for name, part in clipping.fields(uploads).items():
        if name not in bounds:
            raise InputError(f"the upload's field {name} has no bound, so no noise would hide it.")
        clipped[name], within[name] = clipping.clip(part, bounds[name])
    payload = Payload(clipping.replace(uploads, clipped))
    if not moving:
        return payload
    answers = torch.stack([within[name] for name in moving], 1)
    like = trees.leaves(uploads)[0]
    return payload._replace(answers=answers.to(like.dtype).to(like.device) - 0.5)


def probe_upload(algorithm: AnyAlgorithm, x: Vector, version: int = 0) -> Tree:
    """An upload of a client that starts from this model, of the right form but with meaningless values."""
    return _probe(algorithm, x, version)[1]


def upload_fields(algorithm: AnyAlgorithm) -> list[str]:
    """The fields of its upload."""
    return list(clipping.fields(probe_upload(algorithm, torch.zeros(1))))


def server_reads_staleness(algorithm: AnyAlgorithm) -> bool:
    """Whether the server's step depends on the staleness of the cohort."""
    state, upload = _probe(algorithm, torch.zeros(1))

    def after(staleness: int) -> list[Tensor]:
        cohort = Cohort(version=1000, population=10, staleness=(staleness,) * 2, weights=(1.0, 1.0))
        return trees.leaves(algorithm.step(state, upload, cohort))

    fresh = after(0)
    return any(
        not torch.equal(left, right)
        for staleness in (1, 30, 900)
        for left, right in zip(fresh, after(staleness), strict=True)
    )


def shrinks_without_updates(algorithm: AnyAlgorithm) -> bool:
    """Whether a mean of zero, as of a release without updates, changes the initial model."""
    x = torch.ones(1)
    state, upload = algorithm.init(x), probe_upload(algorithm, x)
    nothing = trees.map(torch.zeros_like, upload)
    moved = algorithm.step(state, nothing, Cohort(0, 10, (0, 0), (1.0, 1.0))).x
    return not torch.allclose(moved, x, rtol=0.0, atol=1e-6)


def clients_read_staleness(algorithm: AnyAlgorithm) -> bool:
    """Whether `local` reads `Visit.staleness`, by its traits or by a trial."""
    if traits_of(algorithm).reads_staleness:
        return True
    x = torch.zeros(1)
    state = algorithm.init(x)
    for _ in range(2):  # before their first step some methods multiply the staleness by zero
        tried = [trees.leaves(_probe_local(algorithm, state, x, staleness)) for staleness in (0, 1, 30)]
        if any(not torch.equal(*pair) for other in tried[1:] for pair in zip(tried[0], other, strict=True)):
            return True
        upload, _ = _probe_local(algorithm, state, x, 0)
        state = algorithm.step(state, upload, Cohort(0, 10, (0, 0), (1.0, 1.0)))
    return False


def _probe(algorithm: AnyAlgorithm, x: Vector, version: int = 0) -> tuple[Any, Any]:
    """A state, and the upload of one task from it."""
    state = algorithm.init(x)
    return state, _probe_local(algorithm, state, x, 0, version)[0]


def _probe_local(
    algorithm: AnyAlgorithm, state: Any, x: Vector, staleness: int, version: int = 0
) -> tuple[Any, Any]:
    """The upload of one task and its client's memory."""
    batch = Batch((x.new_zeros(1),))
    numbers = (version, staleness, 0)
    return algorithm.local(
        algorithm.broadcast(state, version),
        algorithm.memory(torch.zeros_like(x)),
        Batches((batch,), (batch,)),
        Visit(*(torch.tensor(number, device=x.device) for number in numbers)),
        ConstantGradient(1.0),
    )


class ConstantGradient(NamedTuple):
    """A gradient whose entries, and a loss whose value, are one number everywhere."""

    value: float

    def __call__(self, x: Vector, batch: Batch, /) -> Vector:
        return torch.full_like(x, self.value)

    def with_loss(self, x: Vector, batch: Batch, /) -> tuple[Vector, Tensor]:
        return self(x, batch), x.new_full((), self.value)

    def descend(self, x: Vector, batch: Batch, lr: Rate, /) -> Vector:
        return x - lr * self.value
