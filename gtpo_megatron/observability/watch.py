"""Serves the report of running jobs on loopback; an open page follows the run folders by itself.

Only files are read, so it works beside any run, and for one that has ended. The server answers to its own names alone,
at whatever port a tunnel has: a web page of somebody else that points a name of theirs at 127.0.0.1 gets nothing.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.observability.group_reader import GroupReader
from gtpo_megatron.observability.metrics_file import METRICS_FILE
from gtpo_megatron.observability.page_json import page_json
from gtpo_megatron.observability.report_page import Content, content, document
from gtpo_megatron.observability.rollout_log import rollout_files
from gtpo_megatron.observability.run_folder import CONFIG_FILE, read_runs

HOST = "127.0.0.1"
MAX_PORT = 65535
_OWN_NAMES = frozenset({HOST, "localhost"})
_SCRIPTS = ("report_samples.js", "report.js", "watch.js")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Edition:
    """The report at one state of the folders."""

    version: str
    content: Content


class LiveReport:
    """The report of some run folders, drawn again when one of them has changed.

    Args:
        folders: of the runs.
        status: one line on where the runs stand; asked at every request.

    Raises:
        DataError: no folder, or one that does not exist.
    """

    def __init__(self, folders: Sequence[Path], *, status: Callable[[], str] = str) -> None:
        self._folders = list(folders)
        self._status = status
        self._lock = threading.Lock()
        self._reader = GroupReader()  # a run goes on, and most of its files stay as they are
        self._edition = self._drawn(self._version())

    def page(self) -> str:
        """The whole page."""
        edition = self._latest()
        shown = replace(edition.content, data=edition.content.data | {"version": edition.version})
        return document(shown, scripts=_SCRIPTS)

    def news(self, since: str) -> dict[str, Any]:
        """What a page needs to follow: always ``version`` and ``status``, the rest only where it has changed.

        Args:
            since: version that the page shows; empty if it does not know.
        """
        edition = self._latest()
        try:
            status = self._status()
        except OSError as error:  # the page need not wait for a line about it
            status = f"status unknown: {error}"
        news: dict[str, Any] = {"version": edition.version, "status": status}
        if edition.version != since:
            shown = edition.content
            news |= {"main": shown.main, "data": shown.data, "title": shown.title}
        return news

    def _latest(self) -> _Edition:
        with self._lock:
            version = self._version()
            if version != self._edition.version:
                self._edition = self._drawn(version)
            return self._edition

    def _drawn(self, version: str) -> _Edition:
        return _Edition(version=version, content=content(read_runs(self._folders, reader=self._reader)))

    def _version(self) -> str:
        """Changes when something that the report shows does."""
        marks = []
        for folder in self._folders:
            for name in (METRICS_FILE, CONFIG_FILE):
                path = folder / name
                found = path.stat() if path.exists() else None
                marks.append(f"{found.st_mtime_ns}.{found.st_size}" if found else "-")
            texts = rollout_files(folder)
            marks.append(f"{len(texts)}.{texts[-1][0] if texts else 0}")
        return "_".join(marks)


class ReportServer:
    """Answers ``/`` with the page and ``/news`` with what has changed.

    Args:
        report: to serve.
        port: 0 takes a free one.

    Raises:
        ConfigError: the port is taken, or none.
    """

    def __init__(self, report: LiveReport, *, port: int) -> None:
        if not 0 <= port <= MAX_PORT:
            raise ConfigError(f"port={port} is no port; choose one up to {MAX_PORT}, or 0 for a free one")
        handler = type("Handler", (_Handler,), {"report": report})
        try:
            self._server = ThreadingHTTPServer((HOST, port), handler)
        except OSError as error:
            raise ConfigError(f"port={port} cannot be used ({error.strerror}); choose another, or 0") from error
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self._server.server_address[1]}/"

    def serve(self) -> None:
        """Answers until :meth:`close`, or until interrupted."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stops answering, from another thread, and frees the port."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    report: LiveReport

    def do_GET(self) -> None:
        """``/`` and ``/news?since=VERSION``."""
        url = urlsplit(self.path)
        if not self._is_for_us():
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this address is not served here\n")
        elif url.path not in ("/", "/news"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is / and /news\n")
        else:
            try:
                if url.path == "/":
                    body, kind = self.report.page(), "text/html"
                else:
                    since = parse_qs(url.query).get("since", [""])[0]
                    body, kind = page_json(self.report.news(since)), "application/json"
            except (DataError, OSError) as error:  # the folder was removed, say: it may come back
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
                return
            self._answer(HTTPStatus.OK, kind, body)

    def log_message(self, format: str, *args: Any) -> None:
        """To our log instead of standard error."""
        logger.debug(format, *args)

    def _is_for_us(self) -> bool:
        return self.headers.get("Host", "").partition(":")[0] in _OWN_NAMES

    def _answer(self, status: HTTPStatus, kind: str, body: str) -> None:
        data = body.encode("utf-8", "replace")  # a model may sample half a pair
        try:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            logger.debug("the page was closed before it had its answer")
