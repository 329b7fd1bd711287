"""Gradients that torch compiles: of one client, or of many clients within `vmap`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from offbeat import trees
from offbeat.core import Batch, Rate, Vector
from offbeat.nn.problem import Problem, Statistics
from offbeat.trees import Structure, Tree


class CompiledGradient:
    """The gradient of a problem and the step that uses it, compiled; to be called within `vmap`."""

    def __init__(self, problem: Problem, backend: str = "inductor") -> None:
        differentiate = problem.by_products()

        def descend(x: Vector, statistics: Statistics, batch: Batch, lr: Tensor) -> tuple[Vector, Statistics]:
            grad, _, new_statistics = differentiate(x, statistics, batch)
            return x - lr * grad, new_statistics

        self._gradient = CompiledMap(differentiate, backend)
        self._step = CompiledMap(descend, backend)

    def __call__(self, x: Vector, statistics: Statistics, batch: Batch) -> tuple[Vector, Tensor, Statistics]:
        gradient: tuple[Vector, Tensor, Statistics] = self._gradient(x, statistics, batch)
        return gradient

    def descend(self, x: Vector, statistics: Statistics, batch: Batch, lr: Rate) -> tuple[Vector, Statistics]:
        """X minus lr times its gradient, and new statistics; another rate needs no other compilation."""
        rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=x.dtype, device=x.device)
        stepped: tuple[Vector, Statistics] = self._step(x, statistics, batch, rate)
        return stepped


class CompiledMap:
    """A function of trees of tensors, compiled together with the `vmap` that it is called in.

    `vmap` is traced before the compiler sees the function, so that everything that can be mapped can be
    compiled. There is one compiled function for each shape and number of clients.
    """

    def __init__(self, function: Callable[..., Tree], backend: str = "inductor") -> None:
        self._function = function
        self._backend = backend
        self._made: Structure = None  # of the last outputs
        self._compiled: dict[tuple[Any, ...], tuple[Callable[..., list[Tensor]], Structure]] = {}

    def __call__(self, *arguments: Tree) -> Any:
        structure = trees.structure(arguments)
        outputs = _Mapped.apply(self, structure, *trees.leaves(arguments))  # type: ignore[no-untyped-call]
        return trees.unflatten(self._made, outputs)

    def stacked(self, structure: Structure, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """The outputs, stacked over clients as the inputs are."""
        key = (structure, *[(leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves])
        if key not in self._compiled:
            self._compiled[key] = self._compile(structure, leaves)
        compiled, self._made = self._compiled[key]
        return tuple(compiled(*leaves))

    def _compile(
        self, structure: Structure, leaves: list[Tensor]
    ) -> tuple[Callable[..., list[Tensor]], Structure]:
        made: list[Structure] = []

        def flat(*inputs: Tensor) -> list[Tensor]:
            outputs = self._function(*trees.unflatten(structure, inputs))
            made.append(trees.structure(outputs))
            return trees.leaves(outputs)

        graph = make_fx(vmap(flat))(*leaves)
        return torch.compile(graph, backend=self._backend, dynamic=False), made[0]


class _Mapped(torch.autograd.Function):
    """Reaches the tensors below `vmap`; nothing is differentiated through it."""

    @staticmethod
    def forward(owner: CompiledMap, structure: Structure, *leaves: Tensor) -> Any:
        outputs = owner.stacked(structure, [leaf.unsqueeze(0) for leaf in leaves])
        return tuple(output.squeeze(0) for output in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], owner: CompiledMap, structure: Structure, *leaves: Tensor
    ) -> Any:
        stacked = [
            leaf.expand(info.batch_size, *leaf.shape) if dim is None else leaf.movedim(dim, 0)
            for leaf, dim in zip(leaves, dims[2:], strict=True)
        ]
        outputs = owner.stacked(structure, stacked)
        return outputs, tuple(0 for _ in outputs)
