"""The workload in pfl, inside pfl's own environment; started by pfl_cifar.py.

    python run_pfl.py FOLDER STEPS DEVICE

With WORLD_SIZE, RANK and MASTER_PORT set, one of several processes that share the work in pfl's own
way. pfl takes NCCL wherever a GPU is there, and NCCL refuses two processes on one GPU; here they are
given Gloo, so that pfl can be measured with many processes on one GPU.
"""

import os
import sys
import time
from pathlib import Path

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FOLDER, STEPS, DEVICE = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ["PFL_PYTORCH_DEVICE"] = DEVICE  # read as pfl is imported
if PROCESSES > 1:
    os.environ["PFL_WORKER_RANK"] = str(RANK)
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join([f"127.0.0.1:{os.environ['MASTER_PORT']}"] * PROCESSES)

import numpy as np
import torch
from torch.nn.functional import cross_entropy

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
if PROCESSES > 1:
    _join = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **rest: _join(backend="gloo", **rest)

import workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import to_tensor
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel


class Turns(TrainingProcessCallback):
    """Stops between iterations until the caller wants more, and tells it how long they took."""

    def __init__(self, task: workload.Workload) -> None:
        self._task = task
        self._left = 0

    def on_train_begin(self, *, model):  # noqa: ANN001, ANN201
        """Before the first iteration."""
        self._wait()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # noqa: ANN001, ANN201
        """Count down; the rest of a turn is waiting."""
        self._left -= 1
        if self._left == 0:
            if DEVICE.startswith("cuda"):
                torch.cuda.synchronize()
            if RANK == 0:
                workload.tell(seconds=time.perf_counter() - self._begun)
                self._done = central_iteration + 1
                if self._done == STEPS:
                    workload.tell(accuracy=self._task.accuracy(model.pytorch_model))
            self._wait()
        return self._stop, Metrics()

    def _wait(self) -> None:
        if RANK == 0:
            wanted = torch.tensor([workload.asked()])
        else:
            wanted = torch.zeros(1, dtype=torch.int64)
        if PROCESSES > 1:
            torch.distributed.broadcast(wanted, 0)  # Gloo waits without using a core
        self._left, self._stop = int(wanted), not wanted
        self._begun = time.perf_counter()


def main() -> None:
    """Train as pfl's own benchmark does, without its evaluations."""
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(RANK)
    task = workload.load(FOLDER)
    module = task.module()

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        module.train()
        return cross_entropy(module(inputs), targets.long())

    module.loss = loss
    module.metrics = lambda inputs, targets: {}
    inputs, targets = to_tensor(np.asarray(task.inputs)), to_tensor(np.asarray(task.targets))
    users = {
        client: (inputs[task.part(client)], targets[task.part(client)])
        for client in range(task.shape.clients)
    }
    data = FederatedDataset.from_slices(users, get_user_sampler("random", range(task.shape.clients)))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), workload.SERVER_LR))
    if RANK == 0:
        workload.tell(ready=True)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=STEPS + 1_000_000,
            evaluation_frequency=2_000_000_000,
            train_cohort_size=task.shape.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=workload.LOCAL_LR, local_batch_size=workload.BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Turns(task)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
