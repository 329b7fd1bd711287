"""What a helper must never forget, on disk: which reports it has counted, and under which terms.

A report is in one sum only. The one exception is a request that comes again just as it was, because
its answer was lost on the way: the sum is a function of the request, so who asks again learns nothing
that the first answer did not tell. What is kept of a request is its digest; the sum is computed again.
Counts and digest are on disk, in one transaction, before the sum leaves the helper.
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
    """What is counted of one run, while nobody else can count; a `Counts`."""

    base: sqlite3.Connection
    run: bytes

    def __contains__(self, task: object) -> bool:
        if not isinstance(task, Task):
            return False
        words = "SELECT 1 FROM counted WHERE run = ? AND client = ? AND visit = ?"
        return self.base.execute(words, (self.run, task.client, task.visit)).fetchone() is not None

    def add(self, task: Task) -> None:
        self.base.execute("INSERT INTO counted VALUES (?, ?, ?)", (self.run, task.client, task.visit))

    def answered(self, digest: bytes) -> bool:
        """Whether just that was asked before."""
        words = "SELECT 1 FROM answered WHERE run = ? AND digest = ?"
        return self.base.execute(words, (self.run, digest)).fetchone() is not None

    def answer(self, digest: bytes) -> None:
        """It is, from now on."""
        self.base.execute("INSERT INTO answered VALUES (?, ?)", (self.run, digest))

    def site(self, client: int) -> str | None:
        """The key that a client has signed with, if it has."""
        words = "SELECT key FROM sites WHERE run = ? AND client = ?"
        found = self.base.execute(words, (self.run, client)).fetchone()
        return None if found is None else str(found[0])

    def bind(self, signers: Mapping[Task, str]) -> None:
        """Each client has its key from now on, which no other client may have."""
        for task, key in signers.items():
            if self.site(task.client) == key:
                continue
            try:
                self.base.execute("INSERT INTO sites VALUES (?, ?, ?)", (self.run, task.client, key))
            except sqlite3.IntegrityError:
                raise SignatureError(
                    f"{report_name(task)} is signed by a site that is another client, or its client is "
                    "another "
                    "site: leave that report out.",
                    [task],
                ) from None


class HelperStore:
    """One helper's file; threads take turns, and so do processes."""

    def __init__(self, path: Path, key: str) -> None:
        """A new file is for this key; an old one refuses any other."""
        self.path = path
        try:
            path.touch(0o600)
            self._base = sqlite3.connect(
                path, timeout=_LOCK_TIMEOUT, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise _unusable(path, error) from None
        try:
            # with less, a power cut just after a commit may bring back the journal that undoes it
            self._base.execute("PRAGMA synchronous = EXTRA")
            self._begin(key)
        except sqlite3.Error as error:
            self.close()
            raise _unusable(path, error) from None
        except InputError:
            self.close()
            raise

    def close(self) -> None:
        """Nothing more will be counted."""
        self._base.close()

    @contextmanager
    def page(self, terms: SecureTerms) -> Iterator[RunTransaction]:
        """One run's, in a transaction that is on disk when this ends, and as if never begun if it fails."""
        with self._transaction():
            self._agree(terms)
            yield RunTransaction(self._base, terms.run)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._base.execute("COMMIT")
        except BaseException:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            raise

    def _agree(self, terms: SecureTerms) -> None:
        """Refuse to change the terms of a run that is known."""
        text = _terms_json(terms)
        words = "SELECT length, terms FROM runs WHERE run = ?"
        found = self._base.execute(words, (terms.run,)).fetchone()
        if found is None:
            self._base.execute("INSERT INTO runs VALUES (?, ?, ?)", (terms.run, terms.length, text))
        elif found[0] != terms.length:
            raise LengthError(
                f"the helper was asked for {terms.length} numbers, not the {found[0]} agreed on."
            )
        elif found[1] != text:
            raise RunError(
                "the helper knows this run under other terms: ask under those, or begin a new run."
            )

    def _begin(self, key: str) -> None:
        with self._transaction():
            (form,) = self._base.execute("PRAGMA user_version").fetchone()
            if form == 0 and not self._base.execute("SELECT 1 FROM sqlite_master").fetchone():
                for table in _TABLES:
                    self._base.execute(table)
                self._base.execute("INSERT INTO helper VALUES (?)", (key,))
                self._base.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            elif form != _SCHEMA_VERSION:
                raise InputError(f"{self.path} is not the store of a helper: name another file.")
            (known,) = self._base.execute("SELECT key FROM helper").fetchone()
            if known != key and self._base.execute("SELECT 1 FROM runs").fetchone():
                raise InputError(
                    f"{self.path} is the store of a helper with another key: give two that belong together."
                )
            self._base.execute("UPDATE helper SET key = ?", (key,))


def request_digest(request: SumRequest, terms: SecureTerms) -> bytes:
    """What tells two requests apart; the order of their reports does not, for a sum has none."""
    reports = sorted(request.reports)
    head = [_terms_json(terms), request.version, [list(task) for task, _ in reports]]
    found = hashlib.sha256(json.dumps(head).encode() + b"\0")
    for _, seed in reports:
        found.update(seed)
    return found.digest()


def _terms_json(terms: SecureTerms) -> str:
    told = write_terms(terms)
    return json.dumps([told["run"], *(told[number] for number in TERM_NUMBERS), told["weights"]])


def _unusable(path: Path, error: Exception) -> InputError:
    return InputError(f"the helper's store {path} cannot be used ({error}): name another file.")
