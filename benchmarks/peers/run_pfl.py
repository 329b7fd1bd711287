"""The workload in pfl, inside pfl's own environment; started by pfl_cifar.py, which sets the variables.

Run as `python run_pfl.py FOLDER STEPS DEVICE`. With several processes they share the work in pfl's
own way. pfl takes NCCL wherever a GPU is there, and NCCL refuses two processes on one GPU; here they
are given Gloo, so that pfl can be measured with many processes on one GPU.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import workload
from torch.nn.functional import cross_entropy

RANK, PROCESSES = int(os.environ.get("PFL_WORKER_RANK", "0")), int(os.environ["PROCESSES"])
FOLDER, STEPS, DEVICE = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Turns:
    """A callback that stops between iterations until more are wanted, and tells how long they took."""

    def __init__(self, task, metrics):
        self._task = task
        self._metrics = metrics
        self._left = 0

    def on_train_begin(self, *, model):
        """Wait for the first turn."""
        self._wait()
        return self._metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Count down; at the end of a turn, tell and wait."""
        self._left -= 1
        if self._left == 0:
            if DEVICE.startswith("cuda"):
                torch.cuda.synchronize()
            seconds = time.perf_counter() - self._begun
            if RANK == 0:
                workload.tell(seconds=seconds)
                if central_iteration + 1 == STEPS:
                    workload.tell(accuracy=self._task.accuracy(model.pytorch_model))
            self._wait()
        return self._stop, self._metrics()

    def on_train_end(self, *, model):
        """Nothing is left to do."""

    def _wait(self):
        wanted = torch.tensor([0 if RANK else workload.asked()])
        if PROCESSES > 1:
            torch.distributed.broadcast(wanted, 0)  # Gloo waits without using a core
        self._left, self._stop = int(wanted), not wanted
        self._begun = time.perf_counter()


def main():
    """Train as pfl's own benchmark does, without its evaluations."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    workload.round_products(os.environ["PRECISION"])
    if PROCESSES > 1:
        join = torch.distributed.init_process_group
        torch.distributed.init_process_group = lambda backend, **rest: join(backend="gloo", **rest)

    # pfl joins its processes as it is imported
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops.pytorch_ops import to_tensor
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    np.random.seed(0)  # noqa: NPY002 - pfl chooses its cohorts from it
    torch.manual_seed(RANK)
    task = workload.load(FOLDER)
    module = task.module()

    def loss(inputs, targets):
        module.train()
        return cross_entropy(module(inputs), targets.long())

    module.loss, module.metrics = loss, lambda inputs, targets: {}
    inputs, targets = to_tensor(np.asarray(task.inputs)), to_tensor(np.asarray(task.targets))
    clients = range(task.shape.clients)
    users = {client: (inputs[task.part(client)], targets[task.part(client)]) for client in clients}
    data = FederatedDataset.from_slices(users, get_user_sampler("random", clients))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), workload.SERVER_LR))
    if RANK == 0:
        workload.tell(ready=True)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=STEPS + 1,  # so that the last turn ends before pfl does
            evaluation_frequency=STEPS + 1,
            train_cohort_size=task.shape.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=workload.LOCAL_LR, local_batch_size=workload.BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Turns(task, Metrics)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
