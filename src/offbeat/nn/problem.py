"""A module and a loss as functions of one flat parameter vector.

The vector holds the parameters that require a gradient, in the module's own order; frozen parameters
stay in the module. Buffers, such as BatchNorm's moments, are not parameters: they accompany the
vector as running statistics, and no algorithm sees them. Buffers that are not part of the module's
state (`persistent=False`) stay in the module as well.

Personal layers are parameters and buffers that each client keeps for itself. They are not in the vector, so
no algorithm, message or upload has them. They accompany the running statistics of a task, and the gradient
of each minibatch moves them by one step of SGD, or of the local optimiser of the run.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from offbeat import trees
from offbeat.core import Batch, LocalOptimizer, Rate, Vector
from offbeat.errors import InputError, describe
from offbeat.nn.layers import (
    Factors,
    FasterModule,
    call_with,
    collect_factors,
    dropout_keys,
    for_one_client,
    with_channels_last,
    with_keyed_dropout,
    with_matmul_convolutions,
)
from offbeat.trees import Tree

Loss: TypeAlias = Callable[[Any, Any], Tensor]  # outputs, targets -> () or (examples,)
Statistics: TypeAlias = dict[str, Tensor]
Objective: TypeAlias = Callable[[dict[str, Tensor], Statistics, Batch], tuple[Tensor, Statistics]]
GradientFn: TypeAlias = Callable[[Vector, Statistics, Batch], tuple[Vector, Tensor, Statistics]]

_SMALL_PATCH = 32  # elements of a patch up to which a product is faster without a compiler
_MAX_NAMES = 12  # of layers in an error
_KEY_STRIDE = 0x632BE5AB  # between the dropout keys of a module's layers
_NORM_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class Precision(Enum):
    """What a GPU may round products to, in convolutions too; sums, weights and updates keep their type."""

    AUTO = "to TensorFloat-32 where the GPU has it"
    FLOAT32 = "not at all"
    TF32 = "to TensorFloat-32"
    BFLOAT16 = "to bfloat16, by autocast"


@contextmanager
def precision_flags(precision: Precision, device: torch.device) -> Iterator[None]:
    """Set torch's backend flags for this precision and for repeatable results; restore them afterwards."""
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    matmul.allow_tf32 = cudnn.allow_tf32 = precision is not Precision.FLOAT32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


class Problem:
    """The objective: the mean over a client's examples of `loss(module(inputs), targets)`.

    `loss` may return one number per batch or one per example; only the latter lets clients whose
    last minibatch is short be computed together. Inputs that are a tuple or a dict are unpacked into
    the module's arguments. The module is copied, so training never changes the caller's. `personal` has
    patterns for the names of layers that stay at the client, such as "head" or "*.norm.*"; they are trained
    there with the rate `personal_lr`.

    Args:
        module: The model; it is copied.
        loss: A function of outputs and targets that returns one number for each example or for the batch.
        weight_decay: The factor of the weights that is added to each gradient.
        precision: What a GPU may round products to.
        personal: The names of layers that stay with each client.
        personal_lr: The learning rate of these layers; None: that of the method.
        personal_optimizer: What takes their steps, with a state that begins anew in each task; None: SGD.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        weight_decay: float = 0.0,
        precision: Precision = Precision.AUTO,
        personal: Collection[str] = (),
        personal_lr: float | None = None,
        personal_optimizer: LocalOptimizer | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InputError(f"the module is {describe(module)}: give a torch.nn.Module.")
        if isinstance(loss, type) or not callable(loss):
            raise InputError(
                f"the loss is {describe(loss)}: give a function of outputs and targets, such as "
                "torch.nn.functional.cross_entropy, or an instance of a loss class."
            )
        if not 0 <= weight_decay < float("inf"):
            raise InputError(f"the weight decay must be at least 0 and finite, not {weight_decay}.")
        self.loss = loss
        self.weight_decay = weight_decay
        self.precision = precision
        self._training = with_keyed_dropout(copy.deepcopy(module).train())
        self._keys = dropout_keys(self._training)
        self._evaluating = copy.deepcopy(module).eval()
        named = {name: p for name, p in self._training.named_parameters() if p.requires_grad}
        if not named:
            raise InputError("the module has no parameter that requires a gradient: nothing to train.")
        if any(p.is_complex() for p in named.values()):
            raise InputError(
                "complex parameters are not supported, since updates are sums of real numbers: keep real and "
                "imaginary parts as parameters, and use torch.view_as_complex in forward."
            )
        kinds = {(p.dtype, p.device) for p in named.values()}
        if len(kinds) > 1:
            raise InputError("the module's parameters must share one dtype and one device: convert it first.")
        kept = self._evaluating.state_dict().keys()
        buffers = {name: buffer for name, buffer in self._evaluating.named_buffers() if name in kept}
        own = _matching(personal, [*named, *buffers])
        self._whole = named, buffers
        self._personal = {
            name: tensor.detach().clone() for name, tensor in (named | buffers).items() if name in own
        }
        self.personal_parameters = tuple(name for name in named if name in own)
        named = {name: p for name, p in named.items() if name not in own}
        if not named:
            raise InputError("every layer is personal, so nothing would be shared: leave some layers out.")
        if self.personal_parameters and personal_lr is None:
            raise InputError("personal layers are trained with a rate of their own: give personal_lr.")
        self._personal_lr = 0.0 if personal_lr is None else personal_lr
        if not 0 <= self._personal_lr < float("inf"):
            raise InputError(f"the rate of personal layers must be at least 0 and finite, not {personal_lr}.")
        self._personal_optimizer = personal_optimizer
        self._optimizer_state = self._initial_optimizer_state(self._personal)
        self._shapes = {name: p.shape for name, p in named.items()}
        self._sizes = [p.numel() for p in named.values()]
        every = list(self._training.named_parameters(remove_duplicate=False))
        self._tied = len(every) > len({id(parameter) for _, parameter in every})
        self._initial = torch.cat([p.detach().reshape(-1) for p in named.values()])
        self._statistics = {
            name: buffer.detach().clone() for name, buffer in buffers.items() if name not in own
        }
        self.has_convolutions = any(isinstance(part, nn.Conv2d) for part in self._training.modules())
        on_cpu = self.device.type == "cpu"
        replace = for_one_client if on_cpu else with_channels_last if self._prefers_channels_last() else None
        self._single = FasterModule(self._training, replace)
        self._scoring: FasterModule | None = None  # in evaluation; None: the module itself
        if on_cpu and self._single.differs:
            self._scoring = FasterModule(self._evaluating, for_one_client)
        self._mapped: FasterModule | None = None  # for `vmap`; None: the module itself
        if not on_cpu:
            by_products = partial(with_matmul_convolutions, max_patch=_SMALL_PATCH)
            self._mapped = FasterModule(self._training, by_products)
        self.tracks_statistics = any(
            isinstance(norm, _NORM_LAYERS)
            and norm.track_running_stats
            and f"{name}.running_mean".removeprefix(".") not in own
            for name, norm in self._training.named_modules()
        )

    def __repr__(self) -> str:
        """The module's own representation, on which its speed depends."""
        return f"Problem({self._training})"

    def initial(self) -> tuple[Vector, Statistics]:
        """The module's own weights and running statistics."""
        return self._initial.clone(), dict(self._statistics)

    @property
    def personal(self) -> Statistics:
        """The module's own values of the personal layers, which clients start from."""
        return dict(self._personal)

    def whole(self) -> tuple[Vector, Statistics]:
        """`initial` as it is without personal layers."""
        named, buffers = self._whole
        return torch.cat([p.detach().reshape(-1) for p in named.values()]), dict(buffers)

    @property
    def size(self) -> int:
        """The number of trained parameters that clients share."""
        return self._initial.numel()

    @property
    def device(self) -> torch.device:
        """The module's device."""
        return self._initial.device

    def parameters(self, x: Vector) -> dict[str, Tensor]:
        """The vector as named views."""
        pieces = torch.split(x, self._sizes)
        return {
            name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    def _prefers_channels_last(self) -> bool:
        """Whether a GPU computes one client faster so: its group norms are much slower, all else faster."""
        norms = (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
        rounds = self.effective_precision != "float32" and self._initial.dtype != torch.float64
        return rounds and not any(isinstance(part, norms) for part in self._training.modules())

    def _check_vector(self, x: Vector) -> None:
        if x.shape != self._initial.shape:
            raise InputError(
                f"the vector has the shape {tuple(x.shape)}, and the module {self.size} parameters: give a "
                "vector of this module, such as the x of a snapshot."
            )

    def module(self, x: Vector, statistics: Mapping[str, Tensor] | None = None) -> nn.Module:
        """A copy of the module with this vector as its weights."""
        self._check_vector(x)
        module = copy.deepcopy(self._evaluating)
        module.load_state_dict(self.parameters(x) | self._given_or_initial(statistics), strict=False)
        return module

    def outputs(self, x: Vector, inputs: Tree, statistics: Mapping[str, Tensor] | None = None) -> Any:
        """The module's outputs in evaluation mode."""
        return self.bind(x, statistics)(inputs)

    def bind(
        self,
        x: Vector,
        statistics: Mapping[str, Tensor] | None = None,
        personal: Mapping[str, Tensor] | None = None,
    ) -> Callable[[Tree], Any]:
        """The module in evaluation mode as a function of its inputs, for a client with these layers."""
        self._check_vector(x)
        tensors = self.parameters(x) | self._given_or_initial(statistics) | dict(personal or {})
        scoring = self._scoring
        if scoring is None:
            return partial(self._call, self._evaluating, tensors)
        return lambda inputs: scoring.compute(lambda module: self._call(module, tensors, inputs))

    def differentiate(
        self, x: Vector, statistics: Statistics, batch: Batch
    ) -> tuple[Vector, Tensor, Statistics]:
        """Gradient, loss and new statistics at x, as a pure function that `vmap` can map."""
        if self._mapped is None:
            return self._by_transform(self._training, x, statistics, batch)
        return self._mapped.compute(lambda module: self._by_transform(module, x, statistics, batch))

    def by_products(self) -> GradientFn:
        """`differentiate` with all convolutions as matrix products, which is faster once it is compiled."""
        return partial(self._by_transform, with_matmul_convolutions(self._training))

    def step_by_products(
        self,
    ) -> Callable[[Vector, Statistics, Batch, Tensor], tuple[list[Tensor], Statistics]]:
        """A step by the gradient of `by_products`: the vector after it in pieces, and new statistics."""
        module = with_matmul_convolutions(self._training)

        def step(
            x: Vector, statistics: Statistics, batch: Batch, lr: Tensor
        ) -> tuple[list[Tensor], Statistics]:
            grads, _, new_statistics = self._transformed(module, self.parameters(x), statistics, batch)
            before = self.parameters(x)
            pieces = [weight - lr * self._decayed(grads[name], weight) for name, weight in before.items()]
            return [piece.reshape(-1) for piece in pieces], new_statistics

        return step

    def differentiate_by_autograd(
        self, x: Vector, statistics: Statistics, batch: Batch
    ) -> tuple[Vector, Tensor, Statistics]:
        """`differentiate` for one client, by plain autograd on views of x; only the result is copied."""
        return self._single.compute(
            lambda module: self._by_autograd(partial(self._objective, module), x, statistics, batch)
        )

    def compiled(self, backend: str = "inductor") -> "CompiledObjective":
        """`differentiate_by_autograd` with an objective compiled by torch, once for each minibatch shape."""

        def objective(*given: Any) -> Any:
            return self._objective(self._training, *given)

        # torch compiles the same code a few times only, and then runs it as it is without a word
        code = objective.__code__.replace()
        own = FunctionType(code, objective.__globals__, closure=objective.__closure__)
        compiled: Objective = torch.compile(own, backend=backend, dynamic=False)
        return CompiledObjective(partial(self._by_autograd, compiled), compiled)

    def leaves(self, x: Vector) -> dict[str, Tensor]:
        """`parameters`, of which gradients can be taken."""
        return {name: view.requires_grad_() for name, view in self.parameters(x.detach()).items()}

    def sgd_step(
        self,
        leaves: dict[str, Tensor],
        statistics: Statistics,
        batch: Batch,
        lr: Rate,
        objective: Objective | None = None,
    ) -> Statistics:
        """Move the leaves of a vector by lr times their gradient, in place and without a gradient vector."""

        def differentiate(module: nn.Module) -> tuple[list[Any], Statistics, Factors]:
            with collect_factors(wanted=not self.personal_parameters) as factors:
                grads, _, after = self._grads(
                    objective or partial(self._objective, module), leaves, statistics, batch, factors
                )
            return grads, after, factors

        if objective is None:
            grads, after, factors = self._single.compute(differentiate)
        else:
            grads, after, factors = differentiate(self._training)
        rate = float(lr) if self.device.type == "cpu" else lr
        with torch.no_grad():
            for leaf, grad in zip(leaves.values(), grads, strict=True):
                if isinstance(rate, Tensor):  # whose number is not known while a graph is recorded
                    leaf.sub_(rate * self._decayed(grad, leaf))
                    continue
                if grad is not None:
                    leaf.sub_(self._decayed(grad, leaf), alpha=rate)
                elif self.weight_decay:
                    leaf.mul_(1 - rate * self.weight_decay)
                for gradients, inputs in factors.get(id(leaf), ()):
                    leaf.addmm_(gradients.t(), inputs, alpha=-rate)
        return after

    @property
    def moving(self) -> tuple[str, ...]:
        """What each minibatch of a task moves beside x: personal layers, and the state of their optimiser."""
        return (*self.personal_parameters, *self._optimizer_state)

    def begin_task(self, statistics: Statistics, key: Tensor) -> Statistics:
        """The statistics of a task whose dropout layers draw by this key; with the state of optimisers."""
        keys = {name: key + number * _KEY_STRIDE for number, name in enumerate(self._keys)}
        return statistics | keys | self._initial_optimizer_state(statistics)

    def end_task(self, statistics: Statistics) -> Statistics:
        """The statistics that a task uploads, and its personal layers."""
        own = {*self._keys, *self._optimizer_state}
        return {name: value for name, value in statistics.items() if name not in own}

    def is_paddable(self, batch: Batch) -> bool:
        """Whether masking the last example of a minibatch gives the gradient and statistics without it.

        This is tried near the initial model: a norm over the batch, a custom mean over the batch or a
        loss of one number per batch shows.
        """
        size = len(trees.leaves(batch.data)[0])
        if size < 3:
            return False
        mask = torch.arange(size, device=self.device) < size - 1
        short = Batch(trees.map(lambda leaf: leaf[:-1], batch.data))
        generator = torch.Generator().manual_seed(0)
        x = self._initial + 0.01 * torch.randn(self.size, generator=generator).to(self._initial)
        rounded = self.precision is Precision.BFLOAT16
        with self._fork_rng(), precision_flags(Precision.FLOAT32, self.device):
            try:
                tried = [
                    self.differentiate_by_autograd(x, self._statistics, each)
                    for each in (short, Batch(batch.data, mask))
                ]
            except InputError:
                return False
        (grad, _, statistics), (masked_grad, _, masked_statistics) = tried
        same = all(torch.allclose(statistics[name], masked_statistics[name]) for name in statistics)
        return same and bool((grad - masked_grad).norm() <= (3e-2 if rounded else 1e-4) * grad.norm())

    def flops(self, batch: Batch) -> int:
        """The operations of products and convolutions in one gradient of a minibatch."""
        with self._fork_rng(), FlopCounterMode(display=False) as counter:
            self.differentiate_by_autograd(self._initial, self._statistics, batch)
        total: int = counter.get_total_flops()
        return total

    def is_deterministic(self, batch: Batch) -> bool:
        """Whether a minibatch has the same gradient twice, without drawing random numbers."""
        if self._keys:
            return False
        with self._fork_rng(), self.precision_context():
            before = self._rng_states()
            first, second = (
                self.differentiate_by_autograd(self._initial, self._statistics, batch)[0] for _ in range(2)
            )
            return torch.allclose(first, second) and all(map(torch.equal, before, self._rng_states()))

    def draws_random_numbers(self, batch: Batch) -> bool:
        """Whether the module uses torch's generators as it computes."""
        with self._fork_rng():
            before = self._rng_states()
            self.differentiate_by_autograd(self._initial, self._statistics, batch)
            return not all(map(torch.equal, before, self._rng_states()))

    @property
    def effective_precision(self) -> str:
        """What products are rounded to on this problem's device: float32 is not at all."""
        if self.precision is not Precision.AUTO:
            return self.precision.name.lower()
        rounds = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (8, 0)
        return "tf32" if rounds else "float32"

    def precision_context(self) -> AbstractContextManager[None]:
        """Torch's backend flags as this problem's precision asks."""
        return precision_flags(self.precision, self.device)

    def _by_transform(
        self, module: nn.Module, x: Vector, statistics: Statistics, batch: Batch
    ) -> tuple[Vector, Tensor, Statistics]:
        (grad, loss, new_statistics) = self._transformed(module, x, statistics, batch)
        return self._decayed(grad, x), loss, new_statistics

    def _transformed(
        self, module: nn.Module, at: Any, statistics: Statistics, batch: Batch
    ) -> tuple[Any, Tensor, Statistics]:
        """The gradient at a vector, or at its named views, without weight decay; the loss; new statistics."""

        def objective(at: Any, personal: Statistics) -> tuple[Tensor, Statistics]:
            parameters = at if isinstance(at, dict) else self.parameters(at)
            return self._objective(module, parameters, statistics | personal, batch)

        personal = self._personal_weights(statistics)
        (grad, grads), (loss, new_statistics) = torch.func.grad_and_value(objective, (0, 1), has_aux=True)(
            at, personal
        )
        return grad, loss, new_statistics | self._moved(statistics, personal, grads)

    def _by_autograd(
        self, objective: Objective, x: Vector, statistics: Statistics, batch: Batch
    ) -> tuple[Vector, Tensor, Statistics]:
        grads, loss, new_statistics = self._grads(objective, self.leaves(x), statistics, batch)
        return self._decayed(torch.cat([grad.reshape(-1) for grad in grads]), x), loss, new_statistics

    def _grads(
        self,
        objective: Objective,
        leaves: dict[str, Tensor],
        statistics: Statistics,
        batch: Batch,
        factors: Collection[int] = (),
    ) -> tuple[list[Any], Tensor, Statistics]:
        """Gradients of leaves (None where all of one is in factors), the loss, and the new statistics."""
        personal = {
            name: weight.detach().requires_grad_()
            for name, weight in self._personal_weights(statistics).items()
        }
        loss, new_statistics = objective(leaves, statistics | personal, batch)
        parameters = list(leaves.values())
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            loss, [*parameters, *personal.values()], allow_unused=True, materialize_grads=not factors
        )
        own = dict(zip(personal, grads[len(parameters) :], strict=True))
        with torch.no_grad():
            moved = self._moved(statistics, personal, own)
        shared = [
            torch.zeros_like(parameter) if grad is None and id(parameter) not in factors else grad
            for parameter, grad in zip(parameters, grads, strict=False)
        ]
        return shared, loss.detach(), new_statistics | moved

    def _objective(
        self, module: nn.Module, parameters: dict[str, Tensor], statistics: Statistics, batch: Batch
    ) -> tuple[Tensor, Statistics]:
        inputs, targets = batch.data
        new_statistics = {name: value.clone() for name, value in (self._personal | statistics).items()}
        for name in self._keys:
            if name not in new_statistics:
                new_statistics[name] = torch.zeros((), dtype=torch.int64, device=self.device)
        try:
            known = {n: value for n, value in new_statistics.items() if n not in self._optimizer_state}
            outputs = self._call(module, parameters | known, inputs)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise InputError(
                "a client has a minibatch of one example, which BatchNorm cannot normalise: "
                "use Steps, Epochs(..., least=2), or a module with GroupNorm."
            ) from None
        return mean_loss(self.loss(outputs, targets), batch), new_statistics

    def _call(self, module: nn.Module, tensors: dict[str, Tensor], inputs: Tree) -> Any:
        kwargs = inputs if isinstance(inputs, dict) else {}
        args = () if kwargs else inputs if isinstance(inputs, tuple) else (inputs,)
        # looking for tied weights is slow, and most modules have none
        call: Callable[..., Any] = partial(functional_call, tie_weights=self._tied)
        if module is self._single.module is not self._training and not self._tied:
            call = call_with
        if self.precision is not Precision.BFLOAT16:
            return call(module, tensors, args, kwargs)
        # autocast's cache of rounded weights must not outlive the recording of a CUDA graph
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            return call(module, tensors, args, kwargs)

    def _personal_weights(self, statistics: Statistics) -> Statistics:
        """The personal layers that are trained; a trial of the module has the initial ones."""
        return {name: statistics.get(name, self._personal[name]) for name in self.personal_parameters}

    def _moved(self, statistics: Statistics, personal: Statistics, grads: Mapping[str, Any]) -> Statistics:
        """Personal layers after a step, and the state of their optimiser."""
        optimizer, moved = self._personal_optimizer, {}
        for name, weight in personal.items():
            grad = self._decayed(grads[name], weight)
            if optimizer is None:
                moved[name] = weight - self._personal_lr * grad
                continue
            start = optimizer.init(weight)
            held = [statistics.get(each, leaf) for each, leaf in _state_of(name, start).items()]
            state = trees.unflatten(trees.structure(start), held)
            moved[name], after = optimizer(weight, grad, state, self._personal_lr)
            moved |= _state_of(name, after)
        return moved

    def _initial_optimizer_state(self, statistics: Statistics) -> Statistics:
        if self._personal_optimizer is None:
            return {}
        found: Statistics = {}
        for name, weight in self._personal_weights(statistics).items():
            found |= _state_of(name, self._personal_optimizer.init(weight))
        return found

    def _decayed(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad + self.weight_decay * x if self.weight_decay else grad

    def _given_or_initial(self, statistics: Mapping[str, Tensor] | None) -> Statistics:
        if statistics is None and self.tracks_statistics:
            raise InputError(
                "this module keeps running statistics: pass statistics=snapshot.statistics beside the vector."
            )
        return self._personal | dict(self._statistics if statistics is None else statistics)

    def _fork_rng(self) -> AbstractContextManager[None]:
        """Restore torch's generators afterwards."""
        fork: AbstractContextManager[None] = torch.random.fork_rng(
            [self.device] if self.device.type == "cuda" else []
        )
        return fork

    def _rng_states(self) -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]


def _matching(patterns: Collection[str], names: Collection[str]) -> set[str]:
    """The names of parameters and buffers that the patterns name, by themselves or by their layer."""
    if isinstance(patterns, str):
        patterns = (patterns,)
    found: set[str] = set()
    for pattern in patterns:
        own = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not own:
            layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
            more = ", ..." if len(layers) > _MAX_NAMES else ""
            raise InputError(
                f"the model has no layer '{pattern}' that could be personal: its layers are "
                f"{', '.join(layers[:_MAX_NAMES])}{more}."
            )
        found |= own
    return found


@dataclass(frozen=True)
class CompiledObjective:
    """A gradient function, and the compiled objective that it differentiates."""

    differentiate: GradientFn
    objective: Objective

    def __call__(self, x: Vector, statistics: Statistics, batch: Batch) -> tuple[Vector, Tensor, Statistics]:
        """As `Problem.differentiate_by_autograd`."""
        return self.differentiate(x, statistics, batch)


def _state_of(name: str, state: Tree) -> Statistics:
    """The state of a personal layer's optimiser by names that no layer has."""
    return {f"{name} optimizer {number}": leaf for number, leaf in enumerate(trees.leaves(state))}


def cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each example: the loss of classifiers where none is given."""
    return cross_entropy(outputs, targets, reduction="none")


def mean_loss(losses: Tensor, batch: Batch) -> Tensor:
    """The mean loss over the examples of a minibatch that are not padding."""
    if losses.ndim == 0:
        return losses
    if len(losses) != len(trees.leaves(batch.data)[0]):
        raise InputError(
            "the loss must give one number per batch or one per example: take the mean of the rest."
        )
    each = losses.flatten(1).mean(1) if losses.ndim > 1 else losses
    if batch.mask is None:
        return each.mean()
    return torch.where(batch.mask, each, 0.0).sum() / batch.mask.sum().clamp_min(1)


def mean_statistics(statistics: Statistics) -> Statistics:
    """The mean of statistics that are stacked over clients; integer counts are rounded."""
    return {name: _mean_over_clients(value) for name, value in statistics.items()}


def _mean_over_clients(value: Tensor) -> Tensor:
    if value.is_floating_point():
        # a mean of equal numbers may differ from them in the last bit, and a constant is to stay as it is
        return torch.where((value == value[:1]).all(), value[0], value.mean(0))
    return value.double().mean(0).round().to(value.dtype)
