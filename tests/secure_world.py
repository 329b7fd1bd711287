"""Helpers of secure sums for tests: in this process, behind HTTP on loopback, and the reports they add."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from offbeat.aggregate.distant import Known
from offbeat.core import Task
from offbeat.deploy import helper_service as service
from offbeat.deploy.helper_desk import Desk
from offbeat.deploy.helper_frames import Asking, read_request, write_request
from offbeat.deploy.helper_store import Store
from offbeat.privacy.secure.client import Report, report
from offbeat.privacy.secure.fixed import Residues
from offbeat.privacy.secure.helper import Request, Sealed
from offbeat.privacy.secure.terms import Terms
from offbeat.schedule.staleness import Equal

TOKEN = "a token of the tests".replace(" ", "-")
KEY = X25519PrivateKey.generate()


def new_terms(run: bytes, length: int = 2, most: int = 6, minimum: int = 3, weight_bits: int = 0) -> Terms:
    return Terms(run, length, most, minimum, weight_bits=weight_bits, weigh=Equal(), rule="constant")


def tasks(*clients: int, version: int = 0, visit: int = 0) -> list[Task]:
    return [Task(client, version, visit) for client in clients]


def made(task: Task, terms: Terms, value: float = 1.0) -> Report:
    return report([torch.full((terms.length,), value)], task, terms, KEY.public_key())


def asked(batch: Sequence[Task], terms: Terms) -> Request:
    """A request with fresh seeds."""
    sealed = tuple(Sealed(task, made(task, terms).sealed) for task in batch)
    return Request(terms.run, 0, terms.length, sealed)


def new_desk(path: Path, sites: object = None, minimum: int = 2) -> Desk:
    store = Store(path, KEY.public_key().public_bytes_raw().hex())
    return Desk(KEY, store, sites, minimum)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Nearby:
    """A way to a helper in this process; requests go through bytes all the same."""

    desk: Desk

    def known(self) -> Known:
        return self.desk.known

    def under(self, terms: Terms) -> "NearbyHelper":
        return NearbyHelper(self.desk, terms)


@dataclass(frozen=True)
class NearbyHelper:
    desk: Desk
    terms: Terms

    def add(self, request: Request) -> Residues:
        answer = self.desk.add(self._through_bytes(request))
        return np.frombuffer(bytearray(answer), "<u4")

    def examine(self, task: Task, sealed: bytes, signature: bytes) -> None:
        request = Request(
            self.terms.run, task.version, self.terms.length, (Sealed(task, sealed),), (signature,)
        )
        self.desk.examine(self._through_bytes(request))

    def _through_bytes(self, request: Request) -> Asking:
        return read_request(write_request(Asking(self.terms, request)))


@contextmanager
def served(desk: Desk, tls: service.Tls | None = None, port: int = 0) -> Iterator[str]:
    """The helper's address, for as long as it is needed; its store is closed then."""
    with service.bound("127.0.0.1", port) as socket:
        server = service.server(service.application(desk, TOKEN), tls)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        try:
            scheme = "http" if tls is None else "https"
            yield f"{scheme}://127.0.0.1:{socket.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            desk.close()
