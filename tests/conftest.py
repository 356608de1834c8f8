"""One thread a process: two cores are soon full, and forked gloo ranks share them."""

import logging
import multiprocessing
import signal
import tempfile
import threading
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

from gtpo_megatron.supervision import process_tree
from tests import order
from tests.dist_utils import seed_all

torch.set_num_threads(1)

# The same examples in every run: a test that fails once in a hundred runs blames whoever runs it. Fresh examples are
# drawn by `make fuzz`. An example that waits for a busy machine is not a slow one, hence no deadline.
# The first failure is all: a search for others goes on past the time that a test has.
settings.register_profile(
    "gate",
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.register_profile("nightly", settings.get_profile("gate"))  # with more of them: examples in tests/strategies.py
settings.load_profile("gate")

# A shell that starts the tests in the background makes them ignore Ctrl-C, and with them every program that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


RANK_MODULES = {
    "gpu_stack": ["tests.te_on_cpu.installed"],  # before Megatron, which it changes
    "megatron": ["transformers", "gtpo_megatron.actor.actor"],
}
"""By the mark of tests that need them."""


@pytest.fixture
def shared_memory(monkeypatch):
    """A folder in place of ``/dev/shm``, where runs of tests beside this one sweep up what nobody has mapped."""
    with tempfile.TemporaryDirectory(dir=process_tree.SHARED_MEMORY, prefix="test-") as folder:
        monkeypatch.setattr(process_tree, "SHARED_MEMORY", Path(folder))
        yield Path(folder)


@pytest.fixture(scope="session")
def megatron():
    """Imports Megatron into this process, without its warnings; ranks have it from theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gtpo_megatron.actor import actor

    return actor


@pytest.fixture(autouse=True)
def random_numbers_as_new():
    """A test that draws without a seed of its own draws the same in every run, whichever tests ran before it."""
    seed_all()


@pytest.fixture(autouse=True)
def loggers_as_new():
    """A command, or a library that it imports, sets loggers up for a whole process, and so for later tests.

    Levels are set where they differ: each time, Python clears what all loggers of the process have cached.
    """
    root = logging.getLogger()
    if root.manager.disable:
        logging.disable(logging.NOTSET)
    if root.level != logging.WARNING:  # as Python has it; Megatron and others raise it
        root.setLevel(logging.WARNING)
    for handler in [found for found in root.handlers if not type(found).__module__.startswith("_pytest.")]:
        root.removeHandler(handler)  # else it writes to a closed stream, or a folder that is gone
        handler.close()
    for name, logger in list(root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in ("gtpo_megatron", "launchers", "tools"):
            logger.disabled, logger.propagate = False, True
            if logger.level:
                logger.setLevel(logging.NOTSET)


def pytest_configure():
    """A suite that was started under ``nohup`` ignores SIGHUP, and so would all that its tests start."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_sessionstart(session):
    """Lines below a warning would bury what a failed test says: torch's checkpoints write thousands of them.

    Pytest's own setting, ``log_level``, changes levels twelve times a test, and each time all loggers lose their cache.
    """
    logs = session.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (logs.caplog_handler, logs.report_handler):
        handler.setLevel(logging.WARNING)


@pytest.hookimpl(tryfirst=True)  # xdist reads groups in the same hook
def pytest_collection_modifyitems(items):
    order.arrange(items)


def pytest_collection_finish(session):
    """What ranks have when they are forked (``tests/dist_utils.py``): seconds once, rather than in each of them."""
    marks = {mark.name for item in session.items for mark in item.iter_markers()}
    more = [module for mark, modules in RANK_MODULES.items() if mark in marks for module in modules]
    multiprocessing.set_forkserver_preload(["pytest", "hypothesis", "torch", *more])


def pytest_addoption(parser):
    parser.addoption("--fuzz-seed", type=int, default=14, help="other damaged inputs in tests/fuzz")
    parser.addoption("--fuzz-times", type=int, default=1, help="so many times as many of them")
    parser.addoption("--rewrite-golden", action="store_true", help="write the golden curves anew")
