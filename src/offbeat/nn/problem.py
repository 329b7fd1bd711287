"""How far a GPU may round the products it computes.

Means over the examples of a minibatch, and over clients.

A module and a loss, as functions of one flat vector.

The vector holds the parameters that require a gradient, in the module's own order; frozen ones
stay in the module. Buffers (BatchNorm's moments, say) are not parameters: they travel beside the
vector as its running statistics, and no algorithm knows of them. Those that are not part of the
module's state (`persistent=False`: numbered places, tables) stay in the module, too.

The gradient function that one task's local work is given.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from offbeat import trees
from offbeat.core import Batch, Vector, where
from offbeat.errors import InputError
from offbeat.nn.layers import LARGE_PATCH, dropout_keys, with_im2col, with_keyed_dropout
from offbeat.trees import Tree


class Precision(Enum):
    """What a GPU may round products to; sums, weights and updates keep the module's own type."""

    TORCH = "as torch is set"
    FLOAT32 = "not at all"
    TF32 = "to TensorFloat-32"
    BFLOAT16 = "to bfloat16, by autocast"


@contextmanager
def precision_flags(precision: Precision, device: torch.device) -> Iterator[None]:
    """Torch's own switches as the precision asks, put back afterwards; a run repeats itself to the bit."""
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    if precision is not Precision.TORCH:
        matmul.allow_tf32 = cudnn.allow_tf32 = precision is not Precision.FLOAT32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def mean_loss(losses: Tensor, batch: Batch) -> Tensor:
    """The mean loss of what is real in a minibatch."""
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


def mean_statistics(statistics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain mean of statistics stacked over clients; counts are rounded."""
    return {name: _mean_over_clients(value) for name, value in statistics.items()}


def _mean_over_clients(value: Tensor) -> Tensor:
    if value.is_floating_point():
        return value.mean(0)
    return value.double().mean(0).round().to(value.dtype)


Loss: TypeAlias = Callable[[Any, Any], Tensor]  # outputs, targets -> () or (examples,)
Statistics: TypeAlias = dict[str, Tensor]
Objective: TypeAlias = Callable[[dict[str, Tensor], Statistics, Batch], tuple[Tensor, Statistics]]
GradientFn: TypeAlias = Callable[[Vector, Statistics, Batch], tuple[Vector, Tensor, Statistics]]

_KEY_STRIDE = 0x632BE5AB  # between the keys of a module's layers
_NORM_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class Problem:
    """What is minimised: the mean over a client's examples of `loss(module(inputs), targets)`.

    `loss` may give one number per batch or one per example; only the latter lets clients whose
    last minibatch is short be computed together. Inputs that are a tuple or a dict are spread
    over the module's arguments. The module is copied: training never touches the caller's.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        weight_decay: float = 0.0,
        precision: Precision = Precision.TORCH,
    ) -> None:
        if not 0 <= weight_decay < float("inf"):
            raise InputError(f"the weight decay must be at least 0 and finite, not {weight_decay}.")
        self.loss = loss
        self.weight_decay = weight_decay
        self.precision = precision
        self._training = with_keyed_dropout(copy.deepcopy(module).train())
        self._keys = dropout_keys(self._training)
        self._evaluating = copy.deepcopy(module).eval()
        self._mapping = self._training  # what is mapped over clients
        self._columns: nn.Module | None = None  # the same, made when it is first asked for
        named = {name: p for name, p in self._training.named_parameters() if p.requires_grad}
        if not named:
            raise InputError("the module has no parameter that requires a gradient: nothing to train.")
        kinds = {(p.dtype, p.device) for p in named.values()}
        if len(kinds) > 1:
            raise InputError("the module's parameters must share one dtype and one device: convert it first.")
        self._shapes = {name: p.shape for name, p in named.items()}
        self._sizes = [p.numel() for p in named.values()]
        every = list(self._training.named_parameters(remove_duplicate=False))
        self._tied = len(every) > len({id(parameter) for _, parameter in every})
        if next(iter(named.values())).is_cuda:
            self._mapping = with_im2col(self._training)
        self._initial = torch.cat([p.detach().reshape(-1) for p in named.values()])
        kept = self._evaluating.state_dict().keys()
        self._statistics = {
            name: buffer.detach().clone() for name, buffer in self._evaluating.named_buffers() if name in kept
        }
        norms = [norm for norm in self._training.modules() if isinstance(norm, _NORM_LAYERS)]
        self.tracks = any(norm.track_running_stats for norm in norms)

    def __repr__(self) -> str:
        """The module's own words: what its speed depends on."""
        return f"Problem({self._training})"

    def initial(self) -> tuple[Vector, Statistics]:
        """The module's own weights and running statistics."""
        return self._initial.clone(), dict(self._statistics)

    @property
    def size(self) -> int:
        """How many parameters are trained."""
        return self._initial.numel()

    @property
    def device(self) -> torch.device:
        """Where the module lives."""
        return self._initial.device

    def parameters(self, x: Vector) -> dict[str, Tensor]:
        """The vector as named views."""
        pieces = torch.split(x, self._sizes)
        return {
            name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    def module(self, x: Vector, statistics: Mapping[str, Tensor] | None = None) -> nn.Module:
        """A copy of the module that holds this vector: what a user takes away."""
        module = copy.deepcopy(self._evaluating)
        module.load_state_dict(self.parameters(x) | self._known(statistics), strict=False)
        return module

    def outputs(self, x: Vector, inputs: Tree, statistics: Mapping[str, Tensor] | None = None) -> Any:
        """What the module in evaluation mode makes of inputs."""
        return self._call(self._evaluating, self.parameters(x) | self._known(statistics), inputs)

    def differentiate(
        self, x: Vector, statistics: Statistics, batch: Batch
    ) -> tuple[Vector, Tensor, Statistics]:
        """Gradient, loss and statistics at x as a pure function that `vmap` can map."""
        return self._by_transform(self._mapping, x, statistics, batch)

    def _by_transform(
        self, module: nn.Module, x: Vector, statistics: Statistics, batch: Batch
    ) -> tuple[Vector, Tensor, Statistics]:
        def objective(x: Vector) -> tuple[Tensor, Statistics]:
            return self._objective(module, self.parameters(x), statistics, batch)

        slope, (loss, left) = torch.func.grad_and_value(objective, has_aux=True)(x)
        return self._decay(slope, x), loss, left

    def differentiate_in_columns(
        self, x: Vector, statistics: Statistics, batch: Batch
    ) -> tuple[Vector, Tensor, Statistics]:
        """`differentiate` with convolutions as products of matrices on the way forward."""
        if self._columns is None:
            self._columns = with_im2col(self._training, LARGE_PATCH)
        return self._by_transform(self._columns, x, statistics, batch)

    def differentiate_alone(
        self, x: Vector, statistics: Statistics, batch: Batch
    ) -> tuple[Vector, Tensor, Statistics]:
        """The same for one client, by plain autograd on views of x: nothing is copied but the result."""
        return self._by_autograd(partial(self._objective, self._training), x, statistics, batch)

    def compiled(self, backend: str = "inductor") -> GradientFn:
        """`differentiate_alone` with the objective compiled by torch, once for every shape of minibatch."""
        objective = torch.compile(partial(self._objective, self._training), backend=backend, dynamic=False)
        return partial(self._by_autograd, objective)

    def descend_alone(
        self, x: Vector, statistics: Statistics, batch: Batch, lr: float
    ) -> tuple[Vector, Statistics]:
        """X less lr times its gradient, written piece by piece: a gradient is never put together."""
        views, slopes, _, left = self._slopes(partial(self._objective, self._training), x, statistics, batch)
        lower = torch.empty_like(x)
        with torch.no_grad():
            for view, slope, room in zip(views, slopes, self.parameters(lower).values(), strict=True):
                torch.sub(view, self._decay(slope, view), alpha=lr, out=room)
        return lower, left

    def with_keys(self, statistics: Statistics, key: Tensor) -> Statistics:
        """Statistics of a task whose module draws by this key."""
        return statistics | {name: key + number * _KEY_STRIDE for number, name in enumerate(self._keys)}

    def without_keys(self, statistics: Statistics) -> Statistics:
        """What is left of a task that others may know."""
        return {name: value for name, value in statistics.items() if name not in self._keys}

    def _by_autograd(
        self, objective: Objective, x: Vector, statistics: Statistics, batch: Batch
    ) -> tuple[Vector, Tensor, Statistics]:
        _, slopes, loss, left = self._slopes(objective, x, statistics, batch)
        return self._decay(torch.cat([slope.reshape(-1) for slope in slopes]), x), loss, left

    def _slopes(
        self, objective: Objective, x: Vector, statistics: Statistics, batch: Batch
    ) -> tuple[list[Tensor], tuple[Tensor, ...], Tensor, Statistics]:
        """Parameters, their gradients, the loss, and the statistics it leaves."""
        views = {name: view.requires_grad_() for name, view in self.parameters(x.detach()).items()}
        loss, left = objective(views, statistics, batch)
        every = list(views.values())
        slopes = torch.autograd.grad(loss, every, allow_unused=True, materialize_grads=True)
        return every, slopes, loss.detach(), left

    def paddable(self, batch: Batch) -> bool:
        """Whether the last example of a minibatch, masked, leaves gradient and statistics as without it.

        It is tried, near the initial model: a norm, a home-made mean over the batch or a loss of
        one number for all would tell.
        """
        size = len(trees.leaves(batch.data)[0])
        if size < 3:
            return False
        mask = torch.arange(size, device=self.device) < size - 1
        short = Batch(trees.map(lambda leaf: leaf[:-1], batch.data))
        generator = torch.Generator().manual_seed(0)
        x = self._initial + 0.01 * torch.randn(self.size, generator=generator).to(self._initial)
        rounded = self.precision is Precision.BFLOAT16
        with self._own_draws(), precision_flags(Precision.FLOAT32, self.device):
            try:
                tried = [
                    self.differentiate_alone(x, self._statistics, each)
                    for each in (short, Batch(batch.data, mask))
                ]
            except InputError:
                return False
        (slope, _, left), (masked, _, also_left) = tried
        same = all(torch.allclose(left[name], also_left[name]) for name in left)
        return same and bool((slope - masked).norm() <= (3e-2 if rounded else 1e-4) * slope.norm())

    def repeats(self, batch: Batch) -> bool:
        """Whether a minibatch has the same gradient twice, and nothing is drawn for it."""
        if self._keys:
            return False
        with self._own_draws(), self.numerics():
            before = self._drawn()
            first, second = (
                self.differentiate_alone(self._initial, self._statistics, batch)[0] for _ in range(2)
            )
            return torch.allclose(first, second) and all(map(torch.equal, before, self._drawn()))

    def draws(self, batch: Batch) -> bool:
        """Whether the module draws random numbers as it computes."""
        with self._own_draws():
            before = self._drawn()
            self.differentiate_alone(self._initial, self._statistics, batch)
            return not all(map(torch.equal, before, self._drawn()))

    def numerics(self) -> AbstractContextManager[None]:
        """Torch's own switches as the precision asks, put back afterwards."""
        return precision_flags(self.precision, self.device)

    def _own_draws(self) -> AbstractContextManager[None]:
        """Torch's generators, put back afterwards."""
        fork: AbstractContextManager[None] = torch.random.fork_rng(
            [self.device] if self.device.type == "cuda" else []
        )
        return fork

    def _drawn(self) -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]

    def _known(self, statistics: Mapping[str, Tensor] | None) -> Statistics:
        if statistics is None and self.tracks:
            raise InputError(
                "this module keeps running statistics: pass statistics=shot.statistics beside the vector."
            )
        return dict(self._statistics if statistics is None else statistics)

    def _losses(
        self, module: nn.Module, parameters: dict[str, Tensor], statistics: Statistics, batch: Batch
    ) -> tuple[Tensor, Statistics]:
        inputs, targets = batch.data
        left = {name: value.clone() for name, value in statistics.items()}
        for name in self._keys:
            left.setdefault(name, torch.zeros((), dtype=torch.int64, device=self.device))
        try:
            outputs = self._call(module, parameters | left, inputs)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise InputError(
                "a client has a minibatch of one example, which BatchNorm cannot normalise: "
                "use Steps, Epochs(..., least=2), or a module with GroupNorm."
            ) from None
        return self.loss(outputs, targets), left

    def _objective(
        self, module: nn.Module, parameters: dict[str, Tensor], statistics: Statistics, batch: Batch
    ) -> tuple[Tensor, Statistics]:
        losses, left = self._losses(module, parameters, statistics, batch)
        return mean_loss(losses, batch), left

    def _call(self, module: nn.Module, given: dict[str, Tensor], inputs: Tree) -> Any:
        words = inputs if isinstance(inputs, dict) else {}
        places = () if words else inputs if isinstance(inputs, tuple) else (inputs,)
        # looking for tied weights is slow, and most modules have none
        if self.precision is not Precision.BFLOAT16:
            return functional_call(module, given, places, words, tie_weights=self._tied)
        # its cache of rounded weights must not outlive a recording
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            return functional_call(module, given, places, words, tie_weights=self._tied)

    def _decay(self, slope: Vector, x: Vector) -> Vector:
        return slope + self.weight_decay * x if self.weight_decay else slope


class TaskGradient:
    """The slopes of one task's minibatches; running statistics pass through it from step to step."""

    def __init__(self, problem: Problem, differentiate: GradientFn, statistics: Statistics) -> None:
        self._problem = problem
        self._differentiate = differentiate
        # memory is the limit of a CPU: there a step is written without putting its gradient together
        self._in_pieces = differentiate == problem.differentiate_alone and problem.device.type == "cpu"
        self.statistics = statistics

    def __call__(self, x: Vector, batch: Batch, /) -> Vector:
        """The gradient of one minibatch at x."""
        slope, _, left = self._differentiate(x, self.statistics, batch)
        self._pass_on(left, batch)
        return slope

    def with_loss(self, x: Vector, batch: Batch, /) -> tuple[Vector, Tensor]:
        """The same with the loss, weight decay included."""
        slope, loss, left = self._differentiate(x, self.statistics, batch)
        self._pass_on(left, batch)
        return slope, loss + 0.5 * self._problem.weight_decay * (x @ x)

    def descend(self, x: Vector, batch: Batch, lr: float, /) -> Vector:
        """X less lr times its gradient."""
        if not self._in_pieces:
            return torch.sub(x, self(x, batch), alpha=lr)
        lower, left = self._problem.descend_alone(x, self.statistics, batch, lr)
        self._pass_on(left, batch)
        return lower

    def _pass_on(self, left: Statistics, batch: Batch) -> None:
        active = batch.active
        self.statistics = left if active is None else where(active, left, self.statistics)
