"""The sandbox of bubblewrap: namespaces of users, mounts, processes, network, IPC and names; see docs/security.md."""

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

from gtpo_megatron.errors import SandboxError
from gtpo_megatron.sandbox import seccomp
from gtpo_megatron.sandbox.packages import framework, is_open_to_all, packages_for
from gtpo_megatron.sandbox.protocol import Case, Job
from gtpo_megatron.sandbox.server import ENVIRONMENT, NOBODY, LocalSandbox, ServerSetup

INSTALL = (
    "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap), or name a "
    "SandboxFusion service by --reward.sandbox http://HOST:PORT; --reward.sandbox unsafe runs programs unprotected"
)

FOLDER = "/tmp"
PACKAGES = "/packages"
FRAMEWORK = "/framework"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM = ("/bin", "/lib", "/lib64", "/lib32", "/sbin")
_OF_ETC = ("/etc/ld.so.cache", "/etc/alternatives")
"""Without them no library is found that lies in a folder of its own or behind a link; both only name what /usr has."""
_INSIDE_ID = "1000"


class BubblewrapSandbox(LocalSandbox):
    """Runs programs under bubblewrap, with one warm process between jobs.

    Args:
        packages: as in ``RewardConfig.packages``.
    """

    def __init__(self, packages: str = "") -> None:
        super().__init__()
        self._packages = packages

    def _prepared(self, folders: ExitStack) -> ServerSetup:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError(f"bubblewrap is not installed: {INSTALL}")
        if os.uname().machine != seccomp.MACHINE:
            raise SandboxError(f"no seccomp filter for {os.uname().machine}, only for {seccomp.MACHINE}")
        python = _interpreter()
        packages = packages_for(self._packages, python)
        pytests = framework(Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="framework-"))))
        return ServerSetup(
            command=[bwrap, *_options(python, packages, pytests)], python=str(python), is_isolated=True, folder=FOLDER,
            packages=(PACKAGES,), framework=(FRAMEWORK,),
        )  # fmt: skip


@lru_cache(maxsize=1)
def check_bubblewrap(packages: str = "") -> None:
    """Runs an empty program, and one that is tested.

    Args:
        packages: as in ``RewardConfig.packages``.

    Raises:
        SandboxError: programs cannot be run so on this machine; the message says how to change that.
    """
    sandbox = BubblewrapSandbox(packages)
    sandbox.prepare()
    test = Case(code="def test_a(): assert f() == 1", num_tests=1)
    try:
        [result] = sandbox.run(Job(source="", language="python", cases=(Case(stdin=""),))).results
        [tested] = sandbox.run(Job(source="def f(): return 1", language="python", cases=(test,))).results
    except SandboxError as error:
        raise SandboxError(
            f"bubblewrap does not work here ({error}); user namespaces may be off (sysctl "
            f"kernel.unprivileged_userns_clone, user.max_user_namespaces, the container's seccomp profile): {INSTALL}"
        ) from error
    finally:
        sandbox.close()
    if result.status != "ok":
        raise SandboxError(f"bubblewrap ran an empty program, which ended with {result.status}: {result.detail}")
    if [one.status for one in tested.tests] != ["ok"]:
        raise SandboxError(f"bubblewrap ran a test in Python, which ended with {tested.status}: {tested.detail}")


def _options(python: Path, packages: Mapping[str, Path], pytests: Mapping[str, Path]) -> list[str]:
    """Options of bwrap: what of the machine is there, read-only, and what is not."""
    options = [
        *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"),
        *(part for name, value in {**ENVIRONMENT, "HOME": FOLDER}.items() for part in ("--setenv", name, value)),
        *("--uid", _INSIDE_ID, "--gid", _INSIDE_ID),
        # the server makes process namespaces and mounts a folder for each program; programs have no capabilities
        *("--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    for name in _OF_ETC:
        options += ["--ro-bind-try", name, name]
    for device in _DEVICES:
        options += ["--dev-bind", device, device]
    prefix = Path(sys.base_prefix)
    if python.is_relative_to(prefix) and not prefix.is_relative_to("/usr"):
        options += ["--ro-bind", str(prefix), str(prefix)]
    for folder, found in ((PACKAGES, packages), (FRAMEWORK, pytests)):
        for name, path in found.items():
            options += ["--ro-bind", str(path), f"{folder}/{name}"]
    return [*options, "--dir", FOLDER, "--remount-ro", "/", "--chdir", "/"]


def _interpreter() -> Path:
    """This Python, without its environment; another one if the sandbox's user cannot read it."""
    own = Path(sys.executable).resolve()
    candidates = [
        own,
        *(Path(found).resolve() for name in ("python3",) if (found := shutil.which(name, path="/usr/bin"))),
    ]
    for path in candidates:
        if os.geteuid() != 0 or is_open_to_all(path):
            return path
    raise SandboxError(
        f"no interpreter that user {NOBODY} may run: {', '.join(map(str, candidates))} lie in folders that only their "
        f"owner may read; install Debian's python3, or do not run as root"
    )
