"""The workload without a framework."""

import os
import time
from typing import ClassVar

import numpy as np
import torch
import workload
from torch.nn.functional import cross_entropy


class Eager:
    """One client after another, as a person would write it: one module, one optimiser, in place."""

    processes: ClassVar = [os.getpid()]

    def __init__(self, task: workload.Workload, device: str, precision: str) -> None:
        workload.round_products(precision)
        self._task = task
        self._module = task.module().to(device)
        self._inputs = torch.from_numpy(task.inputs).to(device)
        self._targets = torch.from_numpy(task.targets).to(device)
        self._rng = np.random.default_rng(0)

    def turn(self, steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            self._step()
        if self._inputs.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def accuracy(self) -> float:
        return self._task.accuracy(self._module)

    def _step(self) -> None:
        weights = list(self._module.parameters())
        before = [weight.detach().clone() for weight in weights]
        total = [torch.zeros_like(weight) for weight in before]
        optimiser = torch.optim.SGD(weights, workload.LOCAL_LR)
        shape = self._task.shape
        for client in self._rng.choice(shape.clients, shape.cohort, replace=False):
            part = self._task.part(client)
            for start in range(part.start, part.stop, workload.BATCH):
                rows = slice(start, start + workload.BATCH)
                optimiser.zero_grad()
                cross_entropy(self._module(self._inputs[rows]), self._targets[rows]).backward()
                optimiser.step()
            with torch.no_grad():
                torch._foreach_add_(total, weights)
                torch._foreach_sub_(total, before)
                torch._foreach_copy_(weights, before)
        with torch.no_grad():
            torch._foreach_add_(weights, total, alpha=workload.SERVER_LR / shape.cohort)
