"""The workload in Flower's simulation, inside Flower's own environment; started by pfl_cifar.py.

Run as `python run_flower.py FOLDER STEPS ACTORS`, with Flower's telemetry and downloads switched off.
"""

import sys
import time
from pathlib import Path

import torch
import workload
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy

FOLDER, STEPS, ACTORS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch of one client."""
    torch.set_num_threads(1)
    task = workload.load(FOLDER)
    module = workload.build(task.shape.dropout)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    part = task.part(int(context.node_config["partition-id"]))
    inputs, targets = torch.from_numpy(task.inputs[part]), torch.from_numpy(task.targets[part])
    optimiser = torch.optim.SGD(module.parameters(), workload.LOCAL_LR)
    for rows in torch.randperm(len(targets)).split(workload.BATCH):
        optimiser.zero_grad()
        cross_entropy(module(inputs[rows]), targets[rows]).backward()
        optimiser.step()
    arrays, count = ArrayRecord(module.state_dict()), MetricRecord({"num-examples": len(targets)})
    return Message(RecordDict({"arrays": arrays, "metrics": count}), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Rounds of FedAvg in turns."""
    task = workload.load(FOLDER)
    module = task.module()
    begun, left = time.perf_counter(), 0

    def turn(done: int, arrays: ArrayRecord) -> None:
        nonlocal begun, left
        left -= 1
        if left > 0:
            return
        if done:
            workload.tell(seconds=time.perf_counter() - begun)
        else:
            workload.tell(ready=True)
        if done == STEPS:
            module.load_state_dict(arrays.to_torch_state_dict())
            workload.tell(accuracy=task.accuracy(module))
        left, begun = workload.asked(), time.perf_counter()

    shape = task.shape
    strategy = FedAvg(
        fraction_train=shape.cohort / shape.clients, fraction_evaluate=0.0, min_available_nodes=shape.clients
    )
    strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=STEPS, evaluate_fn=turn)


if __name__ == "__main__":
    count = workload.load(FOLDER).shape.clients
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server_app,
        client_app,
        num_supernodes=count,
        backend_config={"client_resources": resources, "init_args": {"num_cpus": ACTORS}},
    )
