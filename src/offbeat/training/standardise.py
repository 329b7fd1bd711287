"""Preparation before training: the mean and the standard deviation of each feature over all clients.

`Moments` is a method like those of the catalogue that consists of a full-participation start. Its sums are
therefore computed like every other sum: by an engine or a deployment, in the clear or by secure aggregation.
A client sends the number of its examples, the sum and the sum of squares of each feature, and
how many examples it has of each class. Each number is sent as the limbs of a fixed-point number of 256 bits,
which are small whole numbers: sums are exact, in any order and by secure aggregation as well, and the
variance loses nothing where a mean is large. Only the client's own sums are rounded, in float64, about a
shift near its mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat import trees
from offbeat.aggregate.mean import Mean, PlainSum, Summation
from offbeat.aggregate.secure import Secure
from offbeat.core import Batch, Batches, Cohort, Gradient, Traits, Vector, Visit
from offbeat.data.population import Examples, Population, Steps, check_examples
from offbeat.data.sources import ClientData
from offbeat.engines.engine import Engine
from offbeat.engines.simulation import Sequential
from offbeat.errors import InputError, setting_name
from offbeat.nn.layers import standardised
from offbeat.nn.problem import Problem, cross_entropies
from offbeat.schedule.dispatch import Synchronous
from offbeat.training.loop import train
from offbeat.trees import Tree

LIMB_BITS = 16
LIMBS = 16
_LOWEST = -128  # a number is a multiple of 2^-128 below 2^127
_CONSTANT = 1e-13  # relative to the mean: a smaller deviation is due to rounding
_SPLIT = 134217729.0  # 2^27 + 1, which halves a float64
_BITS = 1  # fractional, of secure sums of limbs
_MAX_BUFFER = 128  # reports in one secure sum
_LARGE, _SMALL = 20.0, 0.02  # root mean squares of a feature that are far from 1
_SAMPLED = 20, 50  # clients, and examples of each, from which scales are estimated

Matrix = NDArray[np.float64]


class FeatureSums(NamedTuple):
    """What a client sends."""

    limbs: Tensor  # (1 + 2 features + classes, limbs) float64, whole numbers


class MomentsState(NamedTuple):
    """The model, which does not change, and the sums over all clients."""

    x: Vector
    limbs: Tensor


@dataclass(frozen=True)
class Moments:
    """The sums of each feature and of its squares, and the examples of each class, over all clients once."""

    features: int
    classes: int = 0  # 0: targets are not classes

    @property
    def traits(self) -> Traits:
        largest = 2.0 ** (LIMB_BITS - 1) * math.sqrt(self._rows * LIMBS)
        return Traits(full_pass=True, bounds=MappingProxyType({"limbs": largest}))

    @property
    def _rows(self) -> int:
        return 1 + 2 * self.features + self.classes

    def init(self, x: Vector) -> MomentsState:
        return MomentsState(x, torch.zeros(self._rows, LIMBS, dtype=torch.float64))

    def memory(self, x: Vector) -> tuple[()]:
        return ()

    def broadcast(self, state: MomentsState, version: int) -> tuple[()]:
        return ()

    def local(
        self, message: tuple[()], memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[FeatureSums, tuple[()]]:
        limbs = np.zeros((self._rows, LIMBS))
        if len(batches.whole[0].data) == 2:  # otherwise this is a trial for the form of the upload
            limbs = _client_limbs(batches.whole, self.features, self.classes)
        return FeatureSums(torch.from_numpy(limbs)), memory

    def step(self, state: MomentsState, mean: FeatureSums, cohort: Cohort) -> MomentsState:
        total = mean.limbs.double().cpu() * len(cohort.weights)
        return state._replace(limbs=total.round())

    def warmup(self) -> Self:
        return self


class Scaling(NamedTuple):
    """The scaling of inputs, (input - mean) / scale, for each feature of a table or channel of an image."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]  # the standard deviation; 1 for a constant feature
    examples: int  # for images, the number of pixels
    classes: tuple[int, ...] | None = None  # how many examples each class has

    @classmethod
    def of(cls, limbs: Tensor, features: int) -> Self:
        """From the sums over all clients."""
        count, *numbers = (_decode(row) for row in limbs.tolist())
        sums, squares, classes = (
            numbers[:features],
            numbers[features : 2 * features],
            numbers[2 * features :],
        )
        if count < 1 or count.denominator != 1:
            raise InputError("the sums of the features over all clients are inconsistent: start again.")
        mean, scale = [], []
        for total, square in zip(sums, squares, strict=True):
            centre = total / count
            spread = square / count - centre * centre
            deviation = math.sqrt(max(0.0, float(spread)))
            mean.append(float(centre))
            scale.append(deviation if deviation > _CONSTANT * abs(float(centre)) else 1.0)
        counts = tuple(int(each) for each in classes) or None
        return cls(tuple(mean), tuple(scale), int(count), counts)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self | None:
        """The scaling that a run has in its settings; None if it has none."""
        known = settings.get("resolved", {}).get("standardise")
        if known is None:
            return None
        counts = known.get("classes")
        return cls(
            tuple(known["mean"]),
            tuple(known["scale"]),
            known["examples"],
            None if counts is None else tuple(counts),
        )

    def as_json(self) -> dict[str, Any]:
        """For the settings of a run."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in self._asdict().items()
        }

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module behind a layer that scales its inputs."""
        return standardised(module, *(torch.tensor(each, dtype=torch.float64) for each in self[:2]))


def measure_scaling(
    problem: Problem, population: Population, summation: Summation | None = None, seed: int = 0
) -> Scaling:
    """Compute the scaling from the data of all clients, in a simulation."""
    examples = population.data.gather(np.asarray(population.parts[0])[:1])
    method = moments_of(problem, examples)
    engine = Sequential(problem, population)
    return Scaling.of(sum_over_clients(method, engine, summation or PlainSum(), seed), method.features)


def sum_over_clients(method: Moments, engine: Engine, summation: Summation, seed: int = 0) -> Tensor:
    """The sums over all clients of an engine, by a run that ends after its start."""
    buffer = min(engine.clients, _MAX_BUFFER)
    if isinstance(summation, Secure):
        summation = limb_secure(summation.minimum)
    steps = train(
        method,
        engine,
        dispatch=Synchronous(buffer),
        buffer=buffer,
        rounds=1,
        aggregate=Mean(summation),
        seed=seed,
    )
    try:
        state: MomentsState = next(steps).state
        return state.limbs
    finally:
        steps.close()  # type: ignore[attr-defined]


def limb_secure(minimum: int) -> Secure:
    """Secure aggregation of limbs, which are whole numbers up to 2^15."""
    return Secure(minimum, bits=_BITS)


def moments_of(problem: Problem, examples: Examples, classes: int | None = None) -> Moments:
    """The method for examples like these."""
    features = count_features(examples.inputs)
    targets = examples.targets
    if classes is None:
        classes = 0
        labels = isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point()
        if labels and problem.loss is cross_entropies:
            one = trees.map(lambda leaf: leaf[:1].to(problem.device), examples.inputs)
            outputs = problem.outputs(*_initial(problem, one))
            classes = outputs.shape[-1] if isinstance(outputs, Tensor) and outputs.ndim == 2 else 0
    return Moments(features, classes)


def _initial(problem: Problem, inputs: Tree) -> tuple[Vector, Tree, Mapping[str, Tensor]]:
    x, statistics = problem.initial()
    return x, inputs, statistics


def count_features(inputs: Tree) -> int:
    """The features of a table, or the channels of images; other inputs are refused."""
    name = setting_name("standardise")
    if not isinstance(inputs, Tensor):
        raise InputError(f"{name} is for inputs that are one tensor, and these are several: leave it out.")
    if not inputs.is_floating_point():
        raise InputError(
            f"{name} is for inputs of floating-point numbers, and these are whole numbers, such as text: "
            "leave it out."
        )
    if inputs.ndim < 2 or not inputs.shape[1]:
        raise InputError(
            f"{name} is for examples with features, and these have no second axis: leave it out."
        )
    return inputs.shape[1]


def standardise(
    module: nn.Module,
    data: Population | ClientData | Examples | tuple[Tree, Tree],
    *,
    secure: Secure | None = None,
) -> nn.Module:
    """The module behind a layer that scales each feature to mean 0 and standard deviation 1.

    The layer holds the mean and the standard deviation of each feature of a table, or of each channel of
    images, over the examples of all clients; its state has them as `standardise.mean` and
    `standardise.scale`. A feature that is constant is divided by 1.

    Args:
        module: A module whose input is one tensor of floating-point numbers, (examples, features, ...).
        data: The clients, or examples that are not divided.
        secure: Sum over clients by secure aggregation; None: in the clear.
    """
    if isinstance(data, ClientData):
        data = data.population(Steps(1, 1))
    elif not isinstance(data, Population):
        examples = check_examples(data)
        data = Population(examples, [np.arange(examples.total)], Steps(1, 1))
    problem = Problem(module, _no_loss)
    return measure_scaling(problem, data, secure).wrap(module)


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise NotImplementedError


def describe_unscaled(examples: Sequence[Examples]) -> str | None:
    """A sentence if features are far from unit scale; None if they are not, or are not real numbers."""
    inputs = [each.inputs for each in examples]
    if not inputs or not all(isinstance(each, Tensor) and each.is_floating_point() for each in inputs):
        return None
    if inputs[0].ndim < 2:
        return None
    rows = torch.cat([each.double().movedim(1, -1).reshape(-1, each.shape[1]).cpu() for each in inputs])
    sizes = rows.square().mean(0).sqrt()
    sizes = sizes[torch.isfinite(sizes) & (rows.amax(0) > rows.amin(0))]  # others than constant features
    if not sizes.numel() or _SMALL <= float(sizes.max()) <= _LARGE:
        return None
    return (
        f"the features are far from unit scale (a root mean square of {float(sizes.max()):.3g}): "
        f"{setting_name('standardise')} scales them in the same way for all clients."
    )


def describe_scales(population: Population) -> str | None:
    """`describe_unscaled` of a few examples of a few clients."""
    clients, examples = _SAMPLED
    chosen = np.linspace(0, len(population) - 1, min(clients, len(population))).astype(int)
    return describe_unscaled(
        [population.data.gather(np.asarray(population.parts[int(client)])[:examples]) for client in chosen]
    )


def _client_limbs(batches: Sequence[Batch], features: int, classes: int) -> Matrix:
    """The sums of one client: examples, features, squares, and examples of each class."""
    rows = [_rows(batch.data[0], features) for batch in batches]
    count = sum(map(len, rows))
    shift = sum(each.sum(0) for each in rows) / count
    if not np.isfinite(shift).all():
        raise InputError("a feature has a value that is NaN or infinite: correct the data of this client.")
    with np.errstate(over="ignore"):
        shift = shift.astype(np.float32).astype(np.float64)  # so that its square is exact
    if not np.isfinite(shift).all():
        raise _too_large()
    rest = sum((each - shift).sum(0) for each in rows)
    squares = sum(np.square(each - shift).sum(0) for each in rows)
    terms = [
        [np.array([float(count)])],
        [count * shift, rest],
        [squares, *_product(2 * shift, rest), *_product(np.full_like(shift, count), shift * shift)],
        [_class_counts([batch.data[1] for batch in batches], classes)],
    ]
    return np.concatenate([_carried(sum(map(_limbs, each))) for each in terms])


def _rows(inputs: Tree, features: int) -> Matrix:
    """(observations, features) in float64."""
    if (count := count_features(inputs)) != features:
        raise InputError(
            f"the examples have {count} features, and {features} are asked for: give every client the same "
            "features."
        )
    rows: Matrix = inputs.detach().double().movedim(1, -1).reshape(-1, features).cpu().numpy()
    return rows


def _class_counts(targets: Sequence[Any], classes: int) -> Matrix:
    counts = np.zeros(classes)
    for each in targets if classes else ():
        labels = each.cpu().numpy()
        if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() >= classes:
            raise InputError(
                f"a label is not among the {classes} classes, which are numbered from 0: correct the labels, "
                "or give the model as many outputs as there are classes."
            )
        counts += np.bincount(labels, minlength=classes)
    return counts


def _product(a: Matrix, b: Matrix) -> tuple[Matrix, Matrix]:
    """Two numbers whose sum is a product exactly (Veltkamp and Dekker)."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    rest = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, rest


def _halves(a: Matrix) -> tuple[Matrix, Matrix]:
    wide = _SPLIT * a
    high = wide - (wide - a)
    return high, a - high


def _limbs(numbers: Matrix) -> Matrix:
    """(numbers, limbs) whole numbers, the lowest first; what is below the lowest is left out."""
    rest, found = np.asarray(numbers, np.float64), []
    if not (np.abs(rest) < 2.0 ** (_LOWEST + LIMB_BITS * LIMBS - 2)).all():
        raise _too_large()
    for index in reversed(range(LIMBS)):
        unit = 2.0 ** (_LOWEST + LIMB_BITS * index)
        limb = np.trunc(rest / unit)
        found.append(limb)
        rest = rest - limb * unit
    return np.stack(found[::-1], 1)


def _carried(limbs: Any) -> Matrix:
    """The same numbers with each limb within 2^15 of 0."""
    found, carry = [], 0.0
    for index in range(LIMBS):
        value = limbs[:, index] + carry
        carry = np.floor(value / 2**LIMB_BITS + 0.5)
        found.append(value - carry * 2**LIMB_BITS)
    if np.any(carry):
        raise _too_large()
    return np.stack(found, 1)


def _decode(limbs: Sequence[float]) -> Fraction:
    total = sum(int(limb) << (LIMB_BITS * index) for index, limb in enumerate(limbs))
    return Fraction(total, 1 << -_LOWEST)


def _too_large() -> InputError:
    return InputError(
        f"a feature is too large for {setting_name('standardise')}: divide it by a constant first."
    )
