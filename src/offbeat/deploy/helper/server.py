"""The helper of secure aggregation: decides whether a request may be answered, and answers over HTTPS.

Anybody may ask for its public key; sums are given only to the leader that knows the token.
"""

import asyncio
import hmac
import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import uvicorn
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from offbeat.aggregate.secure import HelperInfo
from offbeat.core import Task
from offbeat.deploy.helper.protocol import MAX_REQUEST_BYTES, read_request, write_answer
from offbeat.deploy.helper.store import HelperStore, RunTransaction, request_digest
from offbeat.deploy.keys import signed_statement, verify_signature
from offbeat.deploy.network import HttpLimits, TlsFiles, http_server
from offbeat.errors import InputError
from offbeat.files import is_disk_full, replace_file
from offbeat.privacy.mechanism import subkey
from offbeat.privacy.secure.encoding import answered_message, unseal
from offbeat.privacy.secure.servers import SeenReportRanges, SeenReports, SumRequest, add_noise, add_shares
from offbeat.privacy.secure.terms import (
    DEFAULT_MINIMUM,
    OverlapError,
    RefusedError,
    ReplayError,
    RunError,
    SecureTerms,
    SignatureError,
    report_name,
)

_BODY_TIMEOUT = 60.0  # seconds to receive a request
_IDLE_TIMEOUT = 10.0  # seconds without a request after which a connection is closed
_MAX_CONNECTIONS, _MAX_LEADER_CONNECTIONS = 32, 32  # of clients without and with the token
_LOG = logging.getLogger(__name__)


class HelperService:
    """A helper for any number of runs; it answers one request at a time.

    With the public keys of `sites`, a report counts only if one of them signed it. Each client of a run is
    bound to one of these keys for good, and no two clients to the same one. So a leader cannot make up
    clients in order to single out one upload. The reports of one sum must have been clipped to the same
    bounds, and a run whose sums may be of fewer clients than `minimum` is refused.

    All reports of one version must answer the same message, model and plan, and no other run may have sent
    that message. So a leader cannot send all sites but one a model for which their updates vanish, and cannot
    subtract the sums of two runs from each other.

    Beyond that, the helper relies on a leader that follows the protocol. The leader chooses which of the
    real reports are summed, and the model of each version: if the reports of a sum are from different
    versions, some of these models may be made such that updates vanish. Sites that collude with the leader
    count as real ones. Against such a leader only noise helps: where the terms of a run, to which sites seal
    their reports, have noise, the helper adds it to its part of each sum, and refuses reports of clients that
    have contributed as often as the noise covers. With `max_participations` it also bounds the reports of a
    site in all runs together.
    """

    def __init__(
        self,
        key: X25519PrivateKey,
        store: HelperStore,
        sites: Mapping[str, EllipticCurvePublicKey] | None = None,
        minimum: int = DEFAULT_MINIMUM,
        max_participations: int | None = None,
    ) -> None:
        self._key = key
        # From the key, so that a helper that is started again gives a lost answer with the same noise.
        self._noise_key = subkey(key.private_bytes_raw(), "helper noise")
        self._max_participations = max_participations
        self._store = store
        self._sites = sites
        self._minimum = minimum
        self._lock = threading.Lock()  # also bounds memory: one sum at a time

    @property
    def info(self) -> HelperInfo:
        """What anybody may know about the helper."""
        return HelperInfo(
            self._key.public_key().public_bytes_raw(),
            self._sites is not None,
            self._minimum,
            self._store.sums,
        )

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def add(self, terms: SecureTerms, request: SumRequest) -> bytes:
        """Return the sum with the helper's noise, or raise a refusal that changes nothing.

        The noise follows from the request: the answer to a request that is repeated is the same.
        """
        self._check_minimum(terms)
        digest = request_digest(request, terms)
        with self._lock, self._store.transaction(terms) as run:
            repeated = run.was_answered(digest)
            seen: SeenReports = SeenReportRanges() if repeated else run
            signers = self._bind_signers(terms, request, run)
            run.bind_messages(_answered_messages(request), terms.noise is not None)
            total = add_shares(request, terms, self._key, seen)
            if not repeated:
                for task, _ in request.reports:
                    key, version = signers.get(task, ""), request.version
                    run.check_participation(task, key, terms.noise, self._max_participations, version)
                    run.count_participation(task, key, version)
                run.mark_answered(digest)
        return write_answer(terms, add_noise(total, terms.noise, self._noise_key, digest))

    def examine(self, terms: SecureTerms, request: SumRequest) -> None:
        """Raise a refusal if the reports could not be added; nothing is counted."""
        self._check_minimum(terms)
        with self._lock, self._store.transaction(terms) as run:
            signers = self._bind_signers(terms, request, run)
            for task, seed in request.reports:
                unseal(seed, task, terms, self._key)
                run.check_participation(task, signers.get(task, ""), terms.noise, self._max_participations)
            run.bind_messages(_answered_messages(request), terms.noise is not None)

    def _check_minimum(self, terms: SecureTerms) -> None:
        if terms.minimum < self._minimum:
            raise RunError(
                f"this helper sums the reports of at least {self._minimum} clients, and the sums of this run "
                f"may be of {terms.minimum}: start a run with a higher minimum."
            )

    def _bind_signers(self, terms: SecureTerms, request: SumRequest, run: RunTransaction) -> dict[Task, str]:
        """Return the key with which each report was signed, and bind its client to that key."""
        if self._sites is None:
            return {}
        signatures = request.signatures or (b"",) * len(request.reports)
        signers = {}
        for (task, seed), signature in zip(request.reports, signatures, strict=True):
            statement = signed_statement(terms, task, seed)
            bound = run.signer(task.client)
            candidates = self._sites if bound is None else {bound} & self._sites.keys()
            key = next(
                (key for key in candidates if verify_signature(self._sites[key], statement, signature)), None
            )
            if key is None:
                expected = "a known site" if bound is None else "the site of its client"
                raise SignatureError(
                    f"{report_name(task)} is not signed by {expected}: leave that report out.", [task]
                )
            signers[task] = key
        run.bind_signers(signers)
        return signers


def _answered_messages(request: SumRequest) -> dict[Task, bytes]:
    """The digest of the message that each report answers."""
    return {task: answered_message(seed) for task, seed in request.reports}


def build_app(service: HelperService, token: str) -> Starlette:
    """Return the HTTP application of a helper."""

    async def key(request: Request) -> Response:
        info = service.info
        return JSONResponse(info._asdict() | {"key": info.key.hex()})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def add(request: Request) -> Response:
        return await _answer(
            request,
            token,
            lambda *asked: Response(service.add(*asked), media_type="application/octet-stream"),
        )

    async def examine(request: Request) -> Response:
        def check(terms: SecureTerms, asked: SumRequest) -> Response:
            service.examine(terms, asked)
            return JSONResponse({})

        return await _answer(request, token, check)

    return Starlette(
        routes=[
            Route("/key", key, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/add", add, methods=["POST"]),
            Route("/examine", examine, methods=["POST"]),
        ]
    )


def build_server(service: HelperService, token: str, tls: TlsFiles | None) -> uvicorn.Server:
    """Return the HTTP server of a helper, to be run on a bound socket."""
    limits = HttpLimits(_MAX_CONNECTIONS, _MAX_CONNECTIONS, _MAX_LEADER_CONNECTIONS, _IDLE_TIMEOUT)
    return http_server(build_app(service, token), tls, limits)


async def _answer(
    request: Request, token: str, action: Callable[[SecureTerms, SumRequest], Response]
) -> Response:
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        return JSONResponse({"sentence": "the token is not the one of this helper."}, 401)
    if not request.state.connection.identify("leader"):
        return JSONResponse({"sentence": "there are too many connections with this token."}, 503)
    size = request.headers.get("content-length", "")
    if not size.isdecimal() or len(size) > 12:
        return JSONResponse({"sentence": "a request must have a Content-Length."}, 411)
    if int(size) > MAX_REQUEST_BYTES:
        return JSONResponse({"sentence": f"a request has at most {MAX_REQUEST_BYTES} bytes."}, 413)
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            body = bytearray()
            async for chunk in request.stream():  # a chunked body may be longer than announced
                body += chunk
                if len(body) > int(size):
                    return JSONResponse({"sentence": "the request is longer than its Content-Length."}, 413)
        return await run_in_threadpool(lambda: action(*read_request(bytes(body))))
    except TimeoutError:
        return JSONResponse({"sentence": "the request took too long to arrive."}, 408)
    except ClientDisconnect:
        return JSONResponse({}, 400)
    except (sqlite3.Error, OSError) as error:  # the transaction was undone: the request may be repeated
        full = "full" in str(error) or (isinstance(error, OSError) and is_disk_full(error))
        sentence = (
            "the helper's disk is full." if full else f"the helper's store cannot be written ({error})."
        )
        _LOG.error("%s", sentence)
        return JSONResponse({"sentence": sentence}, 507 if full else 500)
    except RefusedError as refusal:
        kind = type(refusal).__name__
        _LOG.warning("refused (%s): %s", kind, refusal)
        facts = {"refusal": kind, "sentence": str(refusal), "tasks": [list(task) for task in refusal.tasks]}
        return JSONResponse(facts, 409 if isinstance(refusal, ReplayError | OverlapError) else 422)


def open_key_and_store(key_file: Path, store: Path) -> tuple[X25519PrivateKey, HelperStore]:
    """Open the helper's key and store, or create both.

    The public key and the number of sums are written beside the private key.
    """
    counter = key_file.with_name(f"{key_file.name}.sums")
    if key_file.exists():
        if not store.exists():
            raise InputError(
                f"{key_file} exists but {store} does not, and with it the record of what was counted under "
                "this key: restore the store, or name a key file that does not exist yet."
            )
        key = _read_key(key_file)
        return key, HelperStore(store, key.public_key().public_bytes_raw().hex(), counter)
    key = X25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw().hex()
    counter.unlink(missing_ok=True)  # of an earlier key
    opened = HelperStore(store, public, counter)  # first, because a key without its store is refused
    try:
        replace_file(key_file.with_name(f"{key_file.name}.pub"), f"{public}\n".encode(), 0o644)
        replace_file(key_file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    except OSError as error:
        opened.close()
        raise InputError(f"{key_file} cannot be written ({error.strerror}): name another file.") from None
    return key, opened


def _read_key(path: Path) -> X25519PrivateKey:
    try:
        mode, data = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise InputError(f"the helper's key {path} cannot be read ({error.strerror}).") from None
    if mode & 0o077:
        raise InputError(f"other users can read {path}, which is secret: use chmod 600.")
    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, X25519PrivateKey):
        raise InputError(f"{path} is not a helper's private key: name another file.")
    return key
