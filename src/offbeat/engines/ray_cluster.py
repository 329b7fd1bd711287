"""Client work on a Ray cluster: several machines, several GPUs.

The cluster is one that runs already, or is started on this machine for the run.
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.data.client_store import Anywhere, MemoryBackend
from offbeat.data.population import Population
from offbeat.engines.execution import Autotune, Execution, Serial
from offbeat.engines.local import Executor
from offbeat.engines.process_pool import available_cores, check_worker_count
from offbeat.engines.shared_memory import pack_tree, read_packed
from offbeat.engines.simulation import SimulatedEngine
from offbeat.engines.worker_pool import (
    PoolExecutor,
    WorkDone,
    WorkerLost,
    WorkerRuntime,
    WorkFailed,
    WorkOrder,
    attempt,
    even_chunks,
    guided_chunks,
    join_orders,
    pack_worker,
)
from offbeat.errors import InputError, setting_name
from offbeat.nn.problem import Problem
from offbeat.schedule.availability import Always, Availability, Dropout
from offbeat.schedule.clock import TaskLimits
from offbeat.schedule.delays import Delay, Tiers
from offbeat.trees import Tree

_RESULT_TIMEOUT = 3600.0  # seconds without any result after which the run stops
_START_TIMEOUT = 120.0  # seconds for a cluster to start all workers
_CONNECT_TIMEOUT = 5.0  # seconds
# The start of an HTTP/2 connection, which Ray uses: the client's preface and an empty SETTINGS frame.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
_SETTINGS_FRAME = 4  # the type of the frame that answers


@dataclass(frozen=True)
class RayCluster(SimulatedEngine):
    """The clients of a buffer on Ray actors; without an address, on a cluster started here for the run.

    Offbeat has to be installed on every machine. A worker has a core, and `gpus` GPUs (or a part of one).
    """

    problem: Problem
    population: Population
    delays: Delay = Tiers("mild")
    availability: Availability = Always()
    dropout: Dropout = Dropout()
    workers: int | None = None  # None: as many as the cluster has room for
    address: str | None = None
    gpus: float = 0.0
    memory: MemoryBackend = Anywhere()
    execution: Execution | None = None  # None: one by one on a core, by a trial on a GPU
    ahead: int = 0  # tasks to compute at once, some ahead of a buffer too small to keep all workers busy
    limits: TaskLimits = TaskLimits()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_worker_count(self.workers)
        if not 0 <= self.gpus < float("inf"):
            raise InputError(f"the number of GPUs of a worker is {self.gpus}: give at least 0.")

    def make_executor(self) -> Executor:
        execution = self.execution or (Autotune() if self.gpus else Serial())
        packed = pack_worker(self.problem, self.population, execution)
        pool = RayPool(packed, self.workers, self.address, self.gpus, available_cores())
        split = guided_chunks if isinstance(execution, Serial) else even_chunks
        return PoolExecutor(pool, self.problem.device, split)

    def tasks_at_once(self) -> int:
        return self.ahead


class RayWorker:
    """The actor that runs on the cluster."""

    def __init__(self, packed: tuple[Tree, NDArray[np.uint8]], device: str, paths: list[str]) -> None:
        sys.path += [path for path in paths if path not in sys.path]  # to import the user's own modules
        torch.set_num_threads(1)
        self._runtime = attempt(0, lambda: WorkerRuntime(_unpack(packed), torch.device(device)))

    def process_id(self) -> int:
        """The process id; an answer also shows that the actor has started."""
        return os.getpid()

    def run(self, order: WorkOrder, memories: tuple[Tree, NDArray[np.uint8]]) -> WorkDone | WorkFailed:
        """Results are packed; errors are returned, since Ray would wrap them."""
        if isinstance(self._runtime, WorkFailed):
            return WorkFailed(order.number, self._runtime.error)
        runtime: WorkerRuntime = self._runtime

        def action() -> WorkDone:
            messages = [_unpack(each) for each in import_ray().get(list(order.messages))]
            done = runtime.run(order._replace(memories=_unpack(memories)), messages)
            return replace(done, results=_pack(done.results))

        answer: WorkDone | WorkFailed = attempt(order.number, action)
        return answer


class RayPool:
    """Workers on a cluster; by default as many as it has room for."""

    def __init__(
        self, packed: Tree, workers: int | None, address: str | None, gpus: float, cores: int
    ) -> None:
        self._ray = import_ray()
        self._connected = connect(address, max(cores, workers or 0))
        self._running: dict[Any, int] = {}
        self._workers: list[Any] = []
        try:
            count = self._count(workers, gpus)
            self._make = self._ray.remote(RayWorker).options(
                num_cpus=1, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD"
            )
            self._device = "cuda" if gpus else "cpu"
            self._packed = self._ray.put(_pack(packed))
            self._workers = [self._start() for _ in range(count)]
            self._await_start()
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> int:
        return len(self._workers)

    def process_ids(self) -> list[int]:
        """The process ids of the workers, on their machines."""
        found: list[int] = self._ray.get([actor.process_id.remote() for actor in self._workers])
        return found

    def place(self, tree: Tree) -> Any:
        return self._ray.put(_pack(tree))

    def remove(self, placed: Any) -> None:
        pass  # Ray counts references

    def give(self, worker: int, order: WorkOrder) -> None:
        memories = _pack(list(order.memories))
        self._running[self._workers[worker].run.remote(order._replace(memories=()), memories)] = worker

    def wait(self) -> Sequence[tuple[int, WorkDone | WorkFailed] | WorkerLost]:
        first, others = self._ray.wait(list(self._running), num_returns=1, timeout=_RESULT_TIMEOUT)
        if not first:
            raise InputError(
                f"the cluster has not answered for {_RESULT_TIMEOUT / 60:.0f} minutes: "
                "see that its machines are up, and go on from the last checkpoint."
            )
        more, _ = self._ray.wait(others, num_returns=len(others), timeout=0) if others else ([], [])
        return [self._receive(each, self._running.pop(each)) for each in [*first, *more]]

    def replace(self, worker: int) -> None:
        with contextlib.suppress(Exception):  # it is gone already in most cases
            self._ray.kill(self._workers[worker])
        self._workers[worker] = self._start()

    def expect(self, tasks: int) -> None:
        pass

    @property
    def in_place(self) -> bool:
        return False

    def join(self, done: Sequence[WorkDone]) -> Tree:
        return join_orders(done)

    def close(self) -> None:
        if self._connected:
            self._connected = False
            disconnect(self._ray)
        elif self._ray.is_initialized():
            for actor in self._workers:
                self._ray.kill(actor)
        self._workers, self._running = [], {}

    def _receive(self, ready: Any, worker: int) -> tuple[int, WorkDone | WorkFailed] | WorkerLost:
        try:
            answer: WorkDone | WorkFailed = self._ray.get(ready)
        except self._ray.exceptions.RayTaskError:
            raise  # a bug of offbeat: errors of user code are returned
        except self._ray.exceptions.RayError as error:
            return WorkerLost(worker, str(error).strip().splitlines()[0].rstrip(".") or type(error).__name__)
        if isinstance(answer, WorkDone):
            answer = replace(answer, results=_unpack(answer.results))
        return worker, answer

    def _start(self) -> Any:
        paths = [path or str(Path.cwd()) for path in sys.path]
        return self._make.remote(self._packed, self._device, paths)

    def _count(self, workers: int | None, gpus: float) -> int:
        resources = self._ray.cluster_resources()
        available = int(resources.get("CPU", 0))
        if gpus:
            available = min(available, int(resources.get("GPU", 0) / gpus))
        count = workers or available
        if not 1 <= count <= available:
            kind = f"{gpus:g} GPU and a core" if gpus else "a core"
            raise InputError(
                f"the cluster has room for {available} workers with {kind} each, not for {max(1, count)}: "
                f"use fewer {setting_name('workers')} or a larger cluster."
            )
        return count

    def _await_start(self) -> None:
        up = [actor.process_id.remote() for actor in self._workers]
        _, missing = self._ray.wait(up, num_returns=len(up), timeout=_START_TIMEOUT)
        if missing:
            raise InputError(
                f"the cluster has not started {len(missing)} of {len(up)} workers in {_START_TIMEOUT:.0f} s: "
                f"use fewer {setting_name('workers')}, or wait until others leave it."
            )


def _pack(tree: Tree) -> tuple[Tree, NDArray[np.uint8]]:
    slots, memory = pack_tree(tree)
    return slots, memory.numpy()


def _unpack(packed: tuple[Tree, NDArray[np.uint8]]) -> Tree:
    """Views of Ray's memory, which is read-only."""
    slots, memory = packed
    return read_packed(slots, _view(memory))


def _view(memory: NDArray[np.uint8]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(memory)


def import_ray() -> Any:
    """Import the package ray, which is optional."""
    try:
        return import_module("ray")
    except ImportError:
        raise InputError(
            "the engine 'ray' needs the package ray: install it with pip install 'offbeat[ray]'."
        ) from None


def check_cluster(address: str | None) -> None:
    """Refuse an address where no cluster answers, before the run starts."""
    ray = import_ray()
    if address is not None and connect(address, 1):
        disconnect(ray)


def connect(address: str | None, cpus: int) -> bool:
    """Connect to a cluster, or start one here; False if this process was connected already."""
    ray = import_ray()
    if address not in (None, "auto"):
        _check_reachable(str(address))
    if ray.is_initialized():
        return False
    own: dict[str, Any] = {} if address else {"num_cpus": cpus, "include_dashboard": False}
    if address is None:
        _set_auth_token()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _keep_sigterm():
        try:
            ray.init(address=address or "local", logging_level="ERROR", log_to_driver=False, **own)
        except (ConnectionError, RuntimeError, SystemExit, ray.exceptions.RayError) as error:
            raise _refused(address, str(error).strip().partition("\n")[0]) from None
    return True


def disconnect(ray: Any) -> None:
    """Disconnect from a cluster, and stop it if it was started here.

    Ray kills its processes and stops waiting a second later, also for those that still run, of which Python
    would warn.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"subprocess \d+ is still running", ResourceWarning)
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing answers; Ray itself would try for two minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise InputError(f"'{address}' is not the address of a cluster: give HOST:PORT of its head, or auto.")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT) as connection:
            if not os.environ.get("RAY_USE_TLS"):
                connection.sendall(_HTTP2_PREFACE)
                answer = connection.recv(9)
                if len(answer) < 4 or answer[3] != _SETTINGS_FRAME:
                    raise ConnectionError
    except OSError:
        raise _unreachable(address) from None


def _set_auth_token() -> None:
    """Set an authentication token for a cluster on this machine, since Ray's ports are open to the network.

    The user's own setting has precedence. Ray reads the environment once, and without a token there would
    write one to the home directory.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextlib.contextmanager
def _keep_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray reavailable."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unreachable(address: str) -> InputError:
    return InputError(
        f"no Ray cluster answers at {address}: start one there, or leave out {setting_name('ray_address')}."
    )


def _refused(address: str | None, reason: str) -> InputError:
    if address is None:
        return InputError(f"Ray does not start here ({reason}): use the engine 'workers'.")
    if address == "auto":
        return InputError(
            f"no Ray cluster runs here: give the address of one, or leave out {setting_name('ray_address')}."
        )
    return InputError(
        f"the Ray cluster at {address} refuses ({reason}): use its version of Ray, and if it wants a token, "
        "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN."
    )
