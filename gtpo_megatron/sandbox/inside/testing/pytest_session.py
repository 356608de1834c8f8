"""A session of pytest that is made before any program comes, and given the tests of a text in a fork.

Collection, fixtures, marks, parameters and unittest's cases are pytest's own; what is not here is files: the module of
the tests was executed from a text that no file has. Runs inside the sandbox; needs pytest besides the standard library.
"""

import importlib
import os
import pathlib
import sys

from gtpo_megatron.sandbox.inside.tracebacks import one_line

LEFT_OUT = (
    "cacheprovider", "terminal", "assertion", "doctest", "pastebin", "faulthandler", "stepwise",
    "setuponly", "setupplan", "threadexception", "unraisableexception", "terminalprogress",
)  # fmt: skip
"""Plugins of pytest that write files, reports or the texts of failures."""

PLUGINS = ("pytest_asyncio.plugin", "pytest_mock")
"""Plugins for asynchronous tests and ``mocker``, where they are installed."""

SETTINGS = ("asyncio_mode=auto", "empty_parameter_set_mark=fail_at_collect", "collect_imported_tests=false")


def prepare(folder):
    """A session that has begun.

    Args:
        folder: place of the folders of the fixture ``tmp_path``.

    Raises:
        ImportError: there is no pytest.
    """
    import pytest
    from _pytest.config import _prepareconfig

    found = [name for name in PLUGINS if importlib.util.find_spec(name.partition(".")[0]) is not None]
    options = [part for name in LEFT_OUT for part in ("-p", f"no:{name}")]
    options += [part for name in found for part in ("-p", name)]
    options += [part for one in SETTINGS for part in ("-o", one)]
    options += ["--disable-plugin-autoload", "-s", "-c", os.devnull, "--rootdir", "/", "--basetemp", f"{folder}/tests"]
    config = _prepareconfig(options, [])
    config._do_configure()
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    pytest.main = lambda *_, **__: 0
    # the names of tests hold what is expected: they are neither in the environment nor in the names of folders
    sys.modules["_pytest.runner"]._update_current_test_var = lambda *_: None
    sys.modules["_pytest.tmpdir"]._mk_tmp = lambda _request, factory: factory.mktemp("test", numbered=True)
    return session


def prepared(folder):
    """The session, or why there is none; see :func:`prepare`."""
    try:
        return prepare(folder)
    except ImportError as error:
        return f"the tests need pytest, which is not here: {error.__cause__ or error.__context__ or error}"


class PytestReports:
    """What pytest says of the collection and of one test, as a plugin."""

    def __init__(self):
        self.reports, self.uncollected = [], []

    def pytest_runtest_logreport(self, report):
        """Keeps the report of a phase."""
        self.reports.append(report)

    def pytest_collectreport(self, report):
        """Keeps why something could not be collected."""
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
            raised = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
            self.uncollected.append((raised or lines or ["it cannot be collected"])[-1])


def collected(session, module):
    """The tests of a module and what reports on them; see :class:`PytestReports` for what could not be collected."""
    import pytest

    class Text(pytest.Module):
        """The module of the tests, which no file has."""

        def _getobj(self):
            return module

    seen = PytestReports()
    session.config.pluginmanager.register(seen)
    node = Text.from_parent(session, path=pathlib.Path("/tests.py"))
    items = list(session.genitems(node))
    session.items, session.testscollected = items, len(items)
    return items, seen


def run(session, items, at, seen):
    """Runs a test; its status and a detail."""
    item = items[at]
    errors = []

    def said(excinfo, *_, **__):
        errors.append(excinfo.value)
        return one_line(excinfo.value)

    item.repr_failure = item._repr_failure_py = said
    seen.reports.clear()
    session.config.hook.pytest_runtest_protocol(item=item, nextitem=items[at + 1] if at + 1 < len(items) else None)
    failed = [report for report in seen.reports if report.failed]
    if failed:
        return "error", str(failed[0].longrepr)
    if any(report.skipped for report in seen.reports) or not seen.reports:
        return "skipped", ""
    return "ok", ""


def is_collectable(space):
    """Whether pytest could find a test among the names of a module."""
    unittest = sys.modules["unittest"]
    return any(
        name.startswith(("test", "Test")) or (isinstance(value, type) and issubclass(value, unittest.TestCase))
        for name, value in space.items()
    )
