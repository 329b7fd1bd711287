"""Helpers of secure sums for tests: in this process, behind HTTP on loopback, and the reports they add."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from offbeat.aggregate.secure import HelperInfo
from offbeat.core import Task
from offbeat.deploy.helper.protocol import read_answer, read_request, write_request
from offbeat.deploy.helper.server import HelperService, build_server
from offbeat.deploy.helper.store import HelperStore
from offbeat.deploy.network import TlsFiles, bind_socket, running_in_thread
from offbeat.privacy.secure.encoding import Report, Residues, make_report
from offbeat.privacy.secure.servers import SealedSeed, SumRequest
from offbeat.privacy.secure.terms import SecureTerms
from offbeat.schedule.staleness import Equal

TOKEN = "a token of the tests".replace(" ", "-")
KEY = X25519PrivateKey.generate()


def new_terms(
    run: bytes, length: int = 2, most: int = 6, minimum: int = 3, weight_bits: int = 0
) -> SecureTerms:
    return SecureTerms(run, length, most, minimum, weight_bits=weight_bits, weigh=Equal(), rule="constant")


def tasks(*clients: int, version: int = 0, visit: int = 0) -> list[Task]:
    return [Task(client, version, visit) for client in clients]


def made(task: Task, terms: SecureTerms, value: float = 1.0) -> Report:
    return make_report([torch.full((terms.length,), value)], task, terms, KEY.public_key())


def asked(batch: Sequence[Task], terms: SecureTerms) -> SumRequest:
    """A request with fresh seeds."""
    sealed = tuple(SealedSeed(task, made(task, terms).sealed) for task in batch)
    return SumRequest(terms.run, 0, terms.length, sealed)


def new_desk(path: Path, sites: object = None, minimum: int = 2) -> HelperService:
    store = HelperStore(path, KEY.public_key().public_bytes_raw().hex())
    return HelperService(KEY, store, sites, minimum)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Nearby:
    """A way to a helper in this process; requests go through bytes all the same."""

    desk: HelperService

    def known(self) -> HelperInfo:
        return self.desk.info

    def under(self, terms: SecureTerms) -> "NearbyHelper":
        return NearbyHelper(self.desk, terms)


@dataclass(frozen=True)
class NearbyHelper:
    desk: HelperService
    terms: SecureTerms

    def add(self, request: SumRequest) -> Residues:
        return read_answer(self.desk.add(*self._through_bytes(request)), self.terms)

    def examine(self, task: Task, sealed: bytes, signature: bytes) -> None:
        request = SumRequest(
            self.terms.run, task.version, self.terms.length, (SealedSeed(task, sealed),), (signature,)
        )
        self.desk.examine(*self._through_bytes(request))

    def _through_bytes(self, request: SumRequest) -> tuple[SecureTerms, SumRequest]:
        return read_request(write_request(self.terms, request))


@contextmanager
def served(desk: HelperService, tls: TlsFiles | None = None, port: int = 0) -> Iterator[str]:
    """The helper's address, for as long as it is needed; its store is closed then."""
    scheme = "http" if tls is None else "https"
    with (
        contextlib.closing(desk),
        bind_socket("127.0.0.1", port) as socket,
        running_in_thread(build_server(desk, TOKEN, tls), socket),
    ):
        yield f"{scheme}://127.0.0.1:{socket.getsockname()[1]}"
