"""Compressed uploads: 8 bits per number, or the largest numbers with error feedback.

`Compressed` wraps the clients' half of an algorithm: its `local` returns what is sent, which is what a
deployment transmits and the records count. The server decodes it before anything else, so clipping, noise and
the algorithm's own step use plain vectors. Vectors of the model's length are compressed; the few numbers that
some methods send beside them, and the uploads of a full-participation start, are not.

Eight bits: blocks of 1024 numbers have a scale each, and a number is rounded at random to one of the two
nearest of 255 levels, so that errors have mean zero (Alistarh et al. 2017, arXiv 1610.02132). Top-k: the k
largest numbers are sent with their indices, and the client adds what was left out to its next upload (Stich
et al. 2018, arXiv 1809.07599). A client's memory is committed only if its upload is used, so nothing is lost
or counted twice when an upload is dropped.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from offbeat import trees
from offbeat.aggregate.mean import Aggregator
from offbeat.aggregate.uploads import probe_upload
from offbeat.core import AnyAlgorithm, Batches, Cohort, Gradient, Traits, Vector, Visit, traits_of
from offbeat.errors import InputError, check_attributes, unknown_name
from offbeat.nn.layers import hash_bits
from offbeat.schedule.parsing import check_kind
from offbeat.trees import Tree

_BLOCK = 1024  # numbers with one scale
_LEVELS = 127  # on either side of zero
_UNIFORM_BITS = 24  # of a random number between 0 and 1
_LEAF_KEY = 0x632BE5AB  # the difference between the keys of an upload's vectors


class Quantised(NamedTuple):
    """A vector with 8 bits per number."""

    levels: Tensor  # (length,) int8
    scales: Tensor  # (blocks,) one level in each block


class Sparse(NamedTuple):
    """The largest numbers of a vector."""

    places: Tensor  # (k,) int32, the indices of the values, ascending
    values: Tensor  # (k,)


class Compression(Protocol):
    """A way to send a vector in fewer bytes."""

    @property
    def feedback(self) -> bool:
        """Whether a client keeps what was lost, and adds it to its next upload."""
        ...

    @property
    def growth(self) -> float:
        """The factor by which the norm of a vector can grow; infinite with feedback."""
        ...

    def encode(self, vector: Vector, key: Tensor) -> Tree:
        """The code that is sent; `key` is the key of random rounding."""
        ...


@dataclass(frozen=True)
class EightBit:
    """8 bits per number and a scale for each 1024 numbers: about a quarter of float32."""

    @property
    def feedback(self) -> bool:
        return False

    @property
    def growth(self) -> float:
        # a number moves by less than its block's largest over 127, and the squares of these largest
        # numbers add up to no more than the squared norm
        return 1 + math.sqrt(_BLOCK) / _LEVELS

    def encode(self, vector: Vector, key: Tensor) -> Quantised:
        length = len(vector)
        blocks = pad(vector, (0, -length % _BLOCK)).view(-1, _BLOCK)
        scales = blocks.abs().amax(1) / _LEVELS
        units = torch.where(scales == 0, torch.ones_like(scales), scales)
        bits = (hash_bits(blocks, key) >> (32 - _UNIFORM_BITS)) & (2**_UNIFORM_BITS - 1)
        wide = blocks.dtype if blocks.dtype == torch.float64 else torch.float32
        uniform = bits.to(wide) * 2.0**-_UNIFORM_BITS
        levels = torch.floor(blocks.to(wide) / units[:, None].to(wide) + uniform)
        return Quantised(levels.clamp(-_LEVELS, _LEVELS).to(torch.int8).view(-1)[:length], scales)


@dataclass(frozen=True)
class TopK:
    """The largest `share` of the numbers, with their indices; the rest is added to the client's next upload.

    A number and its index take 8 bytes in float32, so a share of 0.025 is a twentieth of the size.

    Attributes:
        share: The part of the numbers that is sent, above 0 and at most 1.
    """

    share: float

    def __post_init__(self) -> None:
        check_kind("the share of top-k", self.share)
        if not 0 < self.share <= 1:
            raise InputError(
                f"top-k cannot send a share of {self.share:g} of the numbers: give one above 0 and at most "
                "1, such as 0.05."
            )

    @property
    def feedback(self) -> bool:
        return True

    @property
    def growth(self) -> float:
        return math.inf

    def encode(self, vector: Vector, key: Tensor) -> Sparse:
        count = min(len(vector), math.ceil(self.share * len(vector) - 1e-9))
        places = vector.abs().topk(count).indices.sort().values
        return Sparse(places.to(torch.int32), vector.gather(0, places))


_CODES = (Quantised, Sparse)


def parse_compression(text: str | None) -> Compression | None:
    """`8bit` or `topk:SHARE`; None: uploads are sent as they are."""
    if text is None:
        return None
    name, colon, value = text.strip().partition(":")
    if name == "8bit" and not colon:
        return EightBit()
    if name == "topk":
        try:
            share = float(value)
        except ValueError:
            raise InputError(f"'{text}' is not a compression: write it as topk:SHARE.") from None
        return TopK(share)
    if name == "8bit":
        raise InputError(f"'{text}' is not a compression: 8bit has no value.")
    raise unknown_name("compression", name, ("8bit", "topk"))


def secure_refused(compression: Compression | None, name: str) -> InputError:
    """The error for compressed uploads under secure aggregation."""
    if compression is not None and compression.feedback:
        return InputError(
            f"{name} reveals which numbers of an update are the largest, which secure aggregation hides: use "
            "one of the two."
        )
    return InputError(
        f"{name} has scales that differ between clients, so its levels cannot be summed in secret, and the "
        "shares of secure aggregation take 32 bits per number in any case: use one of the two."
    )


def check_compression(
    algorithm: AnyAlgorithm, compression: Compression | None, aggregate: Aggregator | None = None
) -> None:
    """Reject secure aggregation, and error feedback for a method with two kinds of uploads."""
    if compression is None:
        return
    check_attributes("compress", compression, ["feedback"], "offbeat.EightBit() or offbeat.TopK(share)")
    if aggregate is not None and getattr(getattr(aggregate, "summation", None), "secret", False):
        raise secure_refused(compression, repr(compression))
    if compression.feedback and traits_of(algorithm).two_phases:
        raise InputError(
            f"{type(algorithm).__name__} has two kinds of uploads, and top-k would add what it left out of "
            "one to the other: use 8bit."
        )


def decode(upload: Tree, length: int) -> Tree:
    """The upload with plain vectors of a length in place of codes; of one task, or stacked over tasks."""

    def restore(code: Any) -> Tensor:
        if isinstance(code, Quantised):
            return _dequantise(code)
        if isinstance(code, Sparse):
            zeros = code.values.new_zeros((*code.values.shape[:-1], length))
            return zeros.scatter(-1, code.places.long(), code.values)
        plain: Tensor = code
        return plain

    return trees.map_until(_CODES, restore, upload)


def invalid_code(upload: Tree, length: int) -> str | None:
    """Why an upload is not a valid code, if so; its structure and shapes are assumed to be right."""
    found: list[str] = []

    def check(code: Any) -> None:
        if isinstance(code, Quantised) and bool((code.scales < 0).any()):
            found.append("a scale is negative")
        if isinstance(code, Sparse):
            places = code.places.long()
            if bool((places < 0).any() | (places >= length).any() | (places.diff() <= 0).any()):
                found.append(f"its indices are not ascending numbers below {length}")

    trees.map_until(_CODES, check, upload)
    return found[0] if found else None


class CompressionMemory(NamedTuple):
    """The memory of a client: the method's own, and what compression left out of its uploads."""

    own: Tree
    residual: tuple[Vector, ...]


@dataclass(frozen=True)
class Compressed:
    """An algorithm whose clients compress their uploads."""

    algorithm: AnyAlgorithm
    compression: Compression
    length: int  # of the model
    start: bool = False  # whether this is the full-participation start, whose uploads are not compressed

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, with bounds on norms that hold after rounding."""
        own, growth = traits_of(self._acting), self.compression.growth
        bounds = {} if math.isinf(growth) else {name: bound * growth for name, bound in own.bounds.items()}
        return own._replace(reads_key=not self.start, bounds=MappingProxyType(bounds))

    @property
    def _acting(self) -> AnyAlgorithm:
        warmup = self.algorithm.warmup() if self.start else None
        return warmup or self.algorithm

    def init(self, x: Vector) -> Any:
        return self._acting.init(x)

    def memory(self, x: Vector) -> Any:
        own = self.algorithm.memory(x)
        if not self.compression.feedback:
            return own
        vectors = filter(self._is_vector, trees.leaves(probe_upload(self.algorithm, x)))
        return CompressionMemory(own, tuple(torch.zeros_like(vector) for vector in vectors))

    def broadcast(self, state: Any, version: int) -> Any:
        return self._acting.broadcast(state, version)

    def local(
        self, message: Any, memory: Any, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Any, Any]:
        kept = memory if self.compression.feedback else CompressionMemory(memory, ())
        upload, own = self._acting.local(message, kept.own, batches, visit, grad)
        residual = kept.residual
        if not self.start:
            upload, residual = self._encode(upload, residual, visit)
        return upload, CompressionMemory(own, residual) if self.compression.feedback else own

    def step(self, state: Any, mean: Any, cohort: Cohort) -> Any:
        """The algorithm's step with the mean of decoded uploads."""
        return self._acting.step(state, mean, cohort)

    def warmup(self) -> "Compressed | None":
        if self.start or self.algorithm.warmup() is None:
            return None
        return Compressed(self.algorithm, self.compression, self.length, start=True)

    def decode(self, uploads: Tree) -> Tree:
        """The uploads of the algorithm, apart from what compression loses."""
        return decode(uploads, self.length)

    def _encode(
        self, upload: Tree, residual: tuple[Vector, ...], visit: Visit
    ) -> tuple[Tree, tuple[Vector, ...]]:
        key = torch.zeros_like(visit.version) if isinstance(visit.key, tuple) else visit.key
        sent: list[Tree] = []
        left: list[Vector] = []
        for leaf in trees.leaves(upload):
            if not self._is_vector(leaf):
                sent.append(leaf)
                continue
            place = len(left)
            whole = leaf + residual[place] if residual else leaf
            code = self.compression.encode(whole, key + place * _LEAF_KEY)
            left.append(whole - decode(code, self.length) if residual else leaf)
            sent.append(code)
        return trees.unflatten(trees.structure(upload), sent), tuple(left) if residual else ()

    def _is_vector(self, leaf: Tensor) -> bool:
        return leaf.is_floating_point() and leaf.shape == (self.length,)


def _dequantise(code: Quantised) -> Tensor:
    """Each level times the scale of its block."""
    length, blocks = code.levels.shape[-1], code.scales.shape[-1]
    levels = pad(code.levels, (0, blocks * _BLOCK - length)).to(code.scales.dtype)
    whole = levels.view(*levels.shape[:-1], blocks, _BLOCK) * code.scales[..., None]
    return whole.view(levels.shape)[..., :length]
