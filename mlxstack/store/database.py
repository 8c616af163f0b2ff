"""SQLite files of a home: private, in WAL mode, replaced when damaged."""

import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TypeVar

from mlxstack.core.errors import StackError, UnknownVersion
from mlxstack.store.files import because

log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_S = 5.0
"""Seconds that a statement waits for another process."""
SIDE_FILES = ("", "-wal", "-shm")


class Database:
    """One SQLite file, shared by any number of threads and processes.

    It is opened at the first use. `schema` creates its tables, `version` is that of its format. A
    damaged file is moved aside, with a line in the log.
    """

    def __init__(self, path: Path, schema: str, version: int = 1) -> None:
        self.path = path
        self._schema = schema
        self._version = version
        self._lock = Lock()
        self._connection: sqlite3.Connection | None = None
        self._read_lock = Lock()
        self._reader: sqlite3.Connection | None = None

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in one transaction, all or nothing. Raises StackError."""
        with self._lock:
            try:
                return self._transact(work)
            except sqlite3.OperationalError as error:
                raise self._refused(str(error)) from error
            except sqlite3.DatabaseError as error:
                self._set_aside(str(error))
            try:
                return self._transact(work)
            except sqlite3.Error as error:
                raise self._refused(str(error)) from error

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run queries, which wait for no writer. Raises StackError."""
        try:
            return self._query(work)
        except sqlite3.OperationalError as error:
            raise self._refused(str(error)) from error
        except sqlite3.DatabaseError:
            # A write finds the damage too, and moves the file aside.
            self.run(lambda _: None)
        try:
            return self._query(work)
        except sqlite3.Error as error:
            raise self._refused(str(error)) from error

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            self._close()
        with self._read_lock:
            self._close_reader()

    def _query(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._read_lock:
            try:
                if self._reader is None:
                    self._reader = self._opened()
                return work(self._reader)
            except sqlite3.Error:
                self._close_reader()
                raise

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._connection is None:
            self._connection = self._opened()
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        return result

    def _opened(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite gives its side files the mode of this one. An existing file is not opened
            # here: to close it would end the locks of this process on it.
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            pass
        except OSError as error:
            raise self._refused(because(error)) from error
        connection = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing; a power cut at most the last transactions, never the file.
        connection.execute("PRAGMA synchronous = NORMAL")
        if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("its pages do not fit each other")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, self._version):
            raise UnknownVersion(
                f"{self.path} was written by another release of mlx-stack: it has version "
                f"{version}, this release reads {self._version}; move it away to begin a new one"
            )
        connection.executescript(self._schema)
        connection.execute(f"PRAGMA user_version = {self._version}")

    def _set_aside(self, reason: str) -> None:
        self._close()
        with self._read_lock:
            self._close_reader()
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        for ending in SIDE_FILES:
            with suppress(OSError):
                Path(f"{self.path}{ending}").replace(f"{aside}{ending}")
        log.error("%s is damaged (%s): moved to %s, a new one begins", self.path, reason, aside)

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = None

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _refused(self, reason: str) -> StackError:
        return StackError(f"{self.path} cannot be used: {reason}")
