"""What is refused where programs cannot be run safely, and the filter's own shape."""

import struct
from pathlib import Path

import pytest

from gtpo_megatron.errors import ConfigError, SandboxError
from gtpo_megatron.sandbox import bubblewrap, packages, seccomp, server
from gtpo_megatron.sandbox.choose import UnsafeSandbox, check_sandbox, open_sandbox
from gtpo_megatron.sandbox.inside import reaper
from gtpo_megatron.sandbox.protocol import Case, Job
from tests.sandboxes import needs_bubblewrap


@pytest.fixture
def no_bwrap(monkeypatch):
    bubblewrap.check_bubblewrap.cache_clear()
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda *_, **__: None)
    yield
    bubblewrap.check_bubblewrap.cache_clear()


def test_without_bubblewrap_a_run_is_refused_with_how_to_install_it(no_bwrap):
    with pytest.raises(ConfigError, match=r"bubblewrap is not installed: install bubblewrap \(Debian.*unsafe"):
        check_sandbox("bubblewrap")
    with pytest.raises(SandboxError, match="not installed"):
        open_sandbox("bubblewrap").run(Job(source="", language="python", cases=(Case(stdin=""),)))
    check_sandbox("unsafe")
    check_sandbox("http://127.0.0.1:1")


def test_a_bubblewrap_that_fails_says_what_it_said(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    tmp_path.chmod(0o755)
    which = bubblewrap.shutil.which
    monkeypatch.setattr(
        bubblewrap.shutil, "which", lambda name, path=None: str(broken) if name == "bwrap" else which(name, path=path)
    )
    sandbox = bubblewrap.BubblewrapSandbox()
    with pytest.raises(SandboxError, match="does not start"):
        sandbox.run(Job(source="", language="python", cases=(Case(stdin=""),)))
    sandbox.close()


def test_another_machine_has_no_filter(monkeypatch):
    monkeypatch.setattr(seccomp, "MACHINE", "vax")
    with pytest.raises(SandboxError, match="no seccomp filter for"):
        bubblewrap.BubblewrapSandbox().prepare()


def verdict(code, number, *, argument=0, architecture=0xC000003E):
    """A slow interpreter of the filter: what it returns for one system call."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, argument, *[0] * 5)
    program = [struct.unpack_from("=HBBI", code, 8 * index) for index in range(len(code) // 8)]
    at, loaded = 0, 0
    while True:
        kind, if_true, if_false, value = program[at]
        at += 1
        if kind == 0x20:
            (loaded,) = struct.unpack_from("=I", data, value)
        elif kind == 0x06:
            return value
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[kind]
            at += if_true if holds else if_false


THREAD, NEW_USER, VFORK = 0x00010000, 0x10000000, 0x4000


@pytest.mark.parametrize("may_fork", [False, True])
def test_the_filter_refuses_what_it_lists_and_nothing_else(may_fork):
    code = seccomp.build_filter(may_fork=may_fork)
    new = set() if may_fork else {57, 58}
    refused = {*seccomp.REFUSED.values(), *new}
    for number in range(470):
        if number in (seccomp.CLONE, seccomp.CLONE3):
            continue
        expected = seccomp.REFUSE if number in refused else seccomp.ALLOW
        assert verdict(code, number) == expected, number
    assert verdict(code, seccomp.PRLIMIT, argument=1) == seccomp.REFUSE  # of another process
    assert verdict(code, seccomp.CLONE3) == seccomp.MISSING
    assert verdict(code, seccomp.CLONE, argument=THREAD) == seccomp.ALLOW
    assert verdict(code, seccomp.CLONE, argument=THREAD | NEW_USER) == seccomp.REFUSE
    assert verdict(code, seccomp.CLONE, argument=NEW_USER) == seccomp.REFUSE
    assert verdict(code, seccomp.CLONE, argument=VFORK) == (seccomp.ALLOW if may_fork else seccomp.REFUSE)
    assert verdict(code, 0x40000000 | 1) == seccomp.KILL
    assert verdict(code, 1, architecture=0x40000003) == seccomp.KILL


def test_numbers_of_calls_are_the_kernel_s():
    """Against the C library's own table."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    try:
        lines = header.read_text(encoding="ascii").splitlines()
    except OSError:
        pytest.skip(f"no {header}")
    known = dict(line.split()[1:3] for line in lines if line.startswith("#define __NR_"))
    for name, number in (
        seccomp.REFUSED | {"clone": seccomp.CLONE, "clone3": seccomp.CLONE3, "prlimit64": seccomp.PRLIMIT}
    ).items():
        assert int(known.get(f"__NR_{name}", number)) == number, name


def test_unsafe_has_limits_of_time_and_memory():
    sandbox = UnsafeSandbox()
    [found] = sandbox.run(Job(source="x = bytearray(1 << 34)", language="python", cases=(Case(stdin=""),))).results
    assert "MemoryError" in found.detail
    sandbox.close()


def test_a_language_without_its_compiler_is_an_error_with_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reaper.shutil, "which", lambda *_, **__: None)
    job = {"language": "cpp", "source": "", "cases": [], "total_s": 1.0}
    answer = reaper.Reaper(job, bytearray(), {"folder": str(tmp_path), "is_isolated": False}).answer()
    with pytest.raises(SandboxError, match=r"no C\+\+ compiler: install g\+\+"):
        server._outcome(answer, 0)


@pytest.mark.parametrize(
    "answer",
    [[], {"results": []}, {"results": [1]}, {"results": [{"status": "passed"}]}, {"results": [{"status": ["ok"]}]}],
)
def test_an_answer_of_another_shape_is_an_error(answer):
    with pytest.raises(SandboxError, match="the sandbox answered"):
        server._outcome(answer, 1)


def test_pytest_is_copied_where_the_sandbox_s_user_cannot_read_it(monkeypatch, tmp_path):
    monkeypatch.setattr(packages.os, "geteuid", lambda: 0)
    monkeypatch.setattr(packages, "is_open_to_all", lambda _: False)
    found = packages.framework(tmp_path)
    assert {"pytest", "_pytest", "pluggy", "py.py"} <= found.keys()
    assert all(path.parent == tmp_path for path in found.values())
    assert (tmp_path / "_pytest" / "main.py").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "_pytest").stat().st_mode & 0o777 == 0o755
    assert all(not path.is_relative_to(tmp_path) for path in packages.framework().values())


@needs_bubblewrap
def test_a_machine_without_pytest_is_refused_before_a_run(monkeypatch):
    bubblewrap.check_bubblewrap.cache_clear()
    monkeypatch.setattr(bubblewrap, "framework", lambda _: {})
    with pytest.raises(
        SandboxError, match="ran a test in Python, which ended with error: ImportError: the tests need pytest"
    ):
        bubblewrap.check_bubblewrap()
    bubblewrap.check_bubblewrap.cache_clear()
