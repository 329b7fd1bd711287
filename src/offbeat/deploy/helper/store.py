"""The helper's database: which reports it has counted, and under which terms.

A report is in one sum only. The one exception is a request that is repeated exactly, because its answer was
lost: the sum is a function of the request, so a repeated answer reveals nothing new. Only the digest of a
request is kept, and the sum is computed again. Counts and digest are on disk, in one transaction, before the
sum leaves the helper.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from offbeat.aggregate.secure import TERM_NUMBERS, write_terms
from offbeat.core import Task
from offbeat.errors import InputError
from offbeat.privacy.secure.servers import SumRequest
from offbeat.privacy.secure.terms import LengthError, RunError, SecureTerms, SignatureError, report_name

_SCHEMA_VERSION = 1
_LOCK_TIMEOUT = 30.0  # seconds for another process that is writing
_TABLES = (
    "CREATE TABLE helper (key TEXT NOT NULL)",
    "CREATE TABLE runs (run BLOB PRIMARY KEY, length INTEGER NOT NULL, terms TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE counted (run BLOB, client INTEGER, visit INTEGER, PRIMARY KEY (run, client, visit))"
    " WITHOUT ROWID",
    "CREATE TABLE answered (run BLOB, digest BLOB, PRIMARY KEY (run, digest)) WITHOUT ROWID",
    "CREATE TABLE sites (run BLOB, client INTEGER, key TEXT NOT NULL, PRIMARY KEY (run, client),"
    " UNIQUE (run, key)) WITHOUT ROWID",
)


class RunTransaction(NamedTuple):
    """What was counted in one run, inside a transaction; implements `SeenReports`."""

    connection: sqlite3.Connection
    run: bytes

    def __contains__(self, task: object) -> bool:
        if not isinstance(task, Task):
            return False
        query = "SELECT 1 FROM counted WHERE run = ? AND client = ? AND visit = ?"
        return self.connection.execute(query, (self.run, task.client, task.visit)).fetchone() is not None

    def add(self, task: Task) -> None:
        self.connection.execute("INSERT INTO counted VALUES (?, ?, ?)", (self.run, task.client, task.visit))

    def was_answered(self, digest: bytes) -> bool:
        """Whether a request with this digest was answered before."""
        query = "SELECT 1 FROM answered WHERE run = ? AND digest = ?"
        return self.connection.execute(query, (self.run, digest)).fetchone() is not None

    def mark_answered(self, digest: bytes) -> None:
        self.connection.execute("INSERT INTO answered VALUES (?, ?)", (self.run, digest))

    def signer(self, client: int) -> str | None:
        """Return the key that a client is bound to, if it has signed before."""
        query = "SELECT key FROM sites WHERE run = ? AND client = ?"
        found = self.connection.execute(query, (self.run, client)).fetchone()
        return None if found is None else str(found[0])

    def bind_signers(self, signers: Mapping[Task, str]) -> None:
        """Bind each client to its key; no other client may use that key."""
        for task, key in signers.items():
            if self.signer(task.client) == key:
                continue
            try:
                self.connection.execute("INSERT INTO sites VALUES (?, ?, ?)", (self.run, task.client, key))
            except sqlite3.IntegrityError:
                raise SignatureError(
                    f"{report_name(task)} is signed by a site that is another client, or its client is "
                    "another site: leave that report out.",
                    [task],
                ) from None


class HelperStore:
    """The database of one helper; threads and processes take turns."""

    def __init__(self, path: Path, key: str) -> None:
        """Create the database for this key, or open one that belongs to it."""
        self.path = path
        try:
            path.touch(0o600)
            self._connection = sqlite3.connect(
                path, timeout=_LOCK_TIMEOUT, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise _unusable(path, error) from None
        try:
            # With a weaker setting, a power failure just after a commit may undo it.
            self._connection.execute("PRAGMA synchronous = EXTRA")
            self._open(key)
        except sqlite3.Error as error:
            self.close()
            raise _unusable(path, error) from None
        except InputError:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def transaction(self, terms: SecureTerms) -> Iterator[RunTransaction]:
        """Open a run; what the block does is on disk when it ends, and undone if it raises."""
        with self._transaction():
            self._check_terms(terms)
            yield RunTransaction(self._connection, terms.run)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _check_terms(self, terms: SecureTerms) -> None:
        """Refuse terms other than those that the run began with."""
        text = _terms_json(terms)
        query = "SELECT length, terms FROM runs WHERE run = ?"
        found = self._connection.execute(query, (terms.run,)).fetchone()
        if found is None:
            self._connection.execute("INSERT INTO runs VALUES (?, ?, ?)", (terms.run, terms.length, text))
        elif found[0] != terms.length:
            raise LengthError(
                f"the helper was asked for {terms.length} numbers, not the {found[0]} agreed on."
            )
        elif found[1] != text:
            raise RunError("the helper knows this run under other terms: use those, or start a new run.")

    def _open(self, key: str) -> None:
        with self._transaction():
            execute = self._connection.execute
            (version,) = execute("PRAGMA user_version").fetchone()
            if version == 0 and not execute("SELECT 1 FROM sqlite_master").fetchone():
                for table in _TABLES:
                    execute(table)
                execute("INSERT INTO helper VALUES (?)", (key,))
                execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            elif version != _SCHEMA_VERSION:
                raise InputError(f"{self.path} is not the store of a helper: name another file.")
            (owner,) = execute("SELECT key FROM helper").fetchone()
            if owner != key and execute("SELECT 1 FROM runs").fetchone():
                raise InputError(
                    f"{self.path} is the store of a helper with another key: give two that belong together."
                )
            execute("UPDATE helper SET key = ?", (key,))


def request_digest(request: SumRequest, terms: SecureTerms) -> bytes:
    """Return a digest that identifies a request; the order of its reports does not matter."""
    reports = sorted(request.reports)
    head = [_terms_json(terms), request.version, [list(task) for task, _ in reports]]
    digest = hashlib.sha256(json.dumps(head).encode() + b"\0")
    for _, seed in reports:
        digest.update(seed)
    return digest.digest()


def _terms_json(terms: SecureTerms) -> str:
    facts = write_terms(terms)
    return json.dumps([facts["run"], *(facts[name] for name in TERM_NUMBERS), facts["weights"]])


def _unusable(path: Path, error: Exception) -> InputError:
    return InputError(f"the helper's store {path} cannot be used ({error}): name another file.")
