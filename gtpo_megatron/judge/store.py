"""State that a run's grading processes share: the judge's answers by question, and the calls each budget paid for.

An SQLite database in the run folder. All processes that open it are on one host.
"""

import hashlib
import json
import logging
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import printable

logger = logging.getLogger(__name__)

STORE_FILE = "judge.sqlite"
"""In a run folder, or in the folder of ``gtpo-megatron evaluate``."""

LOCK_PATIENCE_S = 30.0
"""Longest wait for another process's transaction, which takes milliseconds."""

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, answer TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS paid (budget INTEGER PRIMARY KEY, calls INTEGER NOT NULL);
"""


def question_key(question: Mapping[str, Any]) -> str:
    """SHA-256 of a question, which holds everything that the answer depends on."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


def begin_session(path: Path) -> None:
    """Makes or checks the database, and begins all budgets anew; before any grading process opens it.

    Raises:
        DataError: the file cannot be written, or is no database of answers.
    """
    try:
        with closing(_opened(path)) as database, database:
            database.execute("DELETE FROM paid")
    except sqlite3.Error as error:
        is_damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
        advice = (
            "delete it, and the judge is asked again"
            if is_damaged
            else "its folder must be writable, with space left, on a file system with locks; or use "
            "--reward.judge.no-cache without calls_per_step"
        )
        raise DataError(
            f"{printable(path)}: cannot be used for the judge's answers: {printable(error)}; {advice}"
        ) from error


def _opened(path: Path | str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=LOCK_PATIENCE_S, isolation_level="IMMEDIATE")
    database.executescript(_TABLES)
    return database


class JudgeStore:
    """A process's connection.

    Args:
        path: path of the database; None: one in memory, of this process only.
        calls_per_step: the budget; 0: no limit.

    Raises:
        DataError: the database cannot be opened.
    """

    def __init__(self, path: Path | None, *, calls_per_step: int) -> None:
        try:
            self._database = _opened(":memory:" if path is None else path)
        except sqlite3.Error as error:
            raise DataError(f"{printable(path)}: the judge's answers cannot be opened: {printable(error)}") from error
        self._calls_per_step = calls_per_step
        self._has_warned = False

    def take_call(self, budget: int) -> None:
        """Takes one call from the budget of this number.

        Raises:
            DataError: it is used up, or cannot be read.
        """
        if not self._calls_per_step:
            return
        try:
            with self._database:
                taken = self._database.execute(
                    "INSERT INTO paid VALUES (?, 1) ON CONFLICT DO UPDATE SET calls = calls + 1 WHERE calls < ?",
                    (budget, self._calls_per_step),
                ).rowcount
        except sqlite3.Error as error:
            raise DataError(f"the judge's budget cannot be read: {printable(error)}") from error
        if not taken:
            raise DataError(
                f"the judge's budget for this step, {self._calls_per_step} answers, is used up: raise "
                f"reward.judge.calls_per_step"
            )

    def find(self, key: str) -> Any:
        """The answer to a question, as JSON values; None if it was not asked."""
        found = None
        with self._transaction("look for an answer"):
            found = self._database.execute("SELECT answer FROM answers WHERE question = ?", (key,)).fetchone()
        return None if found is None else parse_json(found[0], STORE_FILE, half_pairs=True)

    def keep(self, key: str, answer: Any) -> Any:
        """Keeps an answer; returns the one that is kept: another process may have been told another one before."""
        with self._transaction("keep an answer"), self._database:
            self._database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))
        return self.find(key) or answer

    def close(self) -> None:
        """Ends the connection."""
        self._database.close()

    @contextmanager
    def _transaction(self, what: str) -> Iterator[None]:
        """An answer that cannot be kept, on a full disk for instance, is asked for again; no response fails for it."""
        try:
            yield
        except sqlite3.Error as error:
            if not self._has_warned:
                logger.warning("judge: could not %s (said once per process): %s", what, printable(error))
            self._has_warned = True
