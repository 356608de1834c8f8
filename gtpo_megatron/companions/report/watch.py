"""Serves the report of running jobs on the loopback interface; an open page polls for changes.

Only files are read, so it also works for a run that has ended. The server answers only requests for its own host names,
on any port (tunnels), which prevents DNS rebinding. Without an open page it costs nothing; otherwise reading and
drawing take at most a fifth of one core, however many pages are open.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gtpo_megatron.companions.report.page import SCRIPTS, content, document, plotly_script
from gtpo_megatron.companions.report.run_data import CONFIG_FILE, read_runs
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE
from gtpo_megatron.run_folder.rollout_log import rollout_files

HOST = "127.0.0.1"
MAX_PORT = 65535
PAUSE_PER_LOOK = 4.0
"""Seconds of pause per second that a look at the runs took."""
_PLOTLY = "/plotly.js"
_OWN_NAMES = frozenset({HOST, "localhost"})

logger = logging.getLogger(__name__)


class LiveReport:
    """The report of some run folders, drawn again when one of them has changed.

    Args:
        folders: the run folders.
        status: returns one line about the runs' progress, at every look.
        dollars_per_gpu_hour: see ``report.page.content``.

    Raises:
        DataError: no folders are given, or one does not exist.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        status: Callable[[], str] = str,
        dollars_per_gpu_hour: float | None = None,
    ) -> None:
        self._folders, self._status, self._rate = list(folders), status, dollars_per_gpu_hour
        self._lock, self._drawn_of = threading.Lock(), ""
        self._look()

    def page(self, shown: str = "") -> tuple[str, str | None]:
        """The current page.

        Args:
            shown: the reader's version; empty for none.

        Returns:
            Its version, and the page itself; None if the reader has it.
        """
        with self._lock:
            if time.monotonic() >= self._not_before:
                self._look()
            drawn_of, shown_now, status = self._drawn_of, self._content, self._line
        version = hashlib.sha256(f"{drawn_of} {status}".encode("utf-8", "replace")).hexdigest()[:16]
        if version == shown:
            return version, None
        live = f'<p id="live" role="status" data-version="{version}">{escape(status)}</p>'
        return version, document(shown_now, live=live, scripts=(*SCRIPTS, "watch.js"), plotly_at=_PLOTLY)

    def _look(self) -> None:
        """Finds the line, and draws if a file has changed; a long run's metrics are read whole for either."""
        start = time.monotonic()
        if (state := self._state()) != self._drawn_of:
            self._content = content(read_runs(self._folders), dollars_per_gpu_hour=self._rate)
            self._drawn_of = state
        try:
            self._line = self._status()
        except OSError as error:  # the page is served without the line
            self._line = f"status unknown: {error}"
        end = time.monotonic()
        self._not_before = end + PAUSE_PER_LOOK * (end - start)

    def _state(self) -> str:
        """A digest that changes with the files of the report."""
        marks = []
        for folder in self._folders:
            for path in (folder / METRICS_FILE, folder / CONFIG_FILE):
                found = path.stat() if path.exists() else None
                marks.append(f"{found.st_mtime_ns}.{found.st_size}" if found else "-")
            texts = rollout_files(folder)
            marks.append(f"{len(texts)}.{texts[-1][0] if texts else 0}")
        return "_".join(marks)


class ReportServer:
    """Answers ``/`` with the page, or with 304 if ``If-None-Match`` has the current version.

    Args:
        report: the report.
        port: port; 0 takes a free one.

    Raises:
        ConfigError: the port is in use, or invalid.
    """

    def __init__(self, report: LiveReport, *, port: int) -> None:
        if not 0 <= port <= MAX_PORT:
            raise ConfigError(f"port={port} is no port; choose one up to {MAX_PORT}, or 0 for a free one")
        try:
            self._server = ThreadingHTTPServer((HOST, port), partial(_PageHandler, report))
        except OSError as error:
            raise ConfigError(f"port={port} cannot be used ({error.strerror}); choose another, or 0") from error
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self._server.server_address[1]}/"

    def serve(self) -> None:
        """Answers until :meth:`close`, or until interrupted."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stops answering, from another thread, and frees the port."""
        self._server.shutdown()
        self._server.server_close()


class _PageHandler(BaseHTTPRequestHandler):
    def __init__(self, report: LiveReport, *arguments: Any) -> None:
        self._report = report
        super().__init__(*arguments)  # the base class answers the request

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in _OWN_NAMES:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this address is not served here\n")
        elif self.path == _PLOTLY:
            self._answer(HTTPStatus.OK, "text/javascript", plotly_script())
        elif self.path.partition("?")[0] == "/":
            try:
                version, page = self._report.page(self.headers.get("If-None-Match", "").strip('"'))
            except (DataError, OSError) as error:  # for example a removed folder, which may come back
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
                return
            status = HTTPStatus.NOT_MODIFIED if page is None else HTTPStatus.OK
            self._answer(status, "text/html", page or "", version=version)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only /\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Logs to our logger instead of standard error."""
        logger.debug(format, *args)

    def _answer(self, status: HTTPStatus, kind: str, body: str, *, version: str = "") -> None:
        data = body.encode("utf-8", "replace")  # sampled text may contain surrogates
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(data)), "ETag": f'"{version}"'}
        try:
            self.send_response(status)
            for name, value in (headers | {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            logger.debug("the page was closed before it had its answer")
