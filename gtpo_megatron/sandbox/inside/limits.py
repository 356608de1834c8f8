"""Limits of a process that holds untrusted code; runs inside the sandbox, with the standard library only."""

import base64
import contextlib
import ctypes
import resource
import signal

SYS_CAPSET = 126
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22

MAX_THREADS = 64
MAX_OPEN_FILES = 64
STACK_MIB = 256

libc = ctypes.CDLL(None, use_errno=True)


def called(returned, what):
    """Raises OSError if a C function returned -1."""
    if returned == -1:
        raise OSError(ctypes.get_errno(), what)
    return returned


@contextlib.contextmanager
def memory_limited(mib):
    """Limits the address space for a while."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    hard = before[1]
    soft = mib << 20 if hard == resource.RLIM_INFINITY else min(mib << 20, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def confine(limits, settings, *, num_cases, may_fork):
    """Limits this process for good: it holds untrusted code from here on."""
    seconds = int(limits["compile_s"] if may_fork else min(limits["case_s"] * num_cases, limits["total_s"])) + 2
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_mib"] << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, settings["file_mib"] << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_NPROC, MAX_THREADS),
        (resource.RLIMIT_STACK, STACK_MIB << 20),
    ):
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        if kind != resource.RLIMIT_NPROC or settings["is_isolated"]:  # counts all of the user's processes outside
            resource.setrlimit(kind, (most, most))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error that a program can see
    called(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    if settings["is_isolated"]:
        drop_capabilities()
        use_filter(base64.b64decode(settings["compiler_filter" if may_fork else "program_filter"]))


def drop_capabilities():
    """Gives up all capabilities; no_new_privs is set, so that none comes back."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    called(libc.syscall(SYS_CAPSET, header, (ctypes.c_uint32 * 6)()), "capset")


class Filter(ctypes.Structure):
    """The kernel's ``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def use_filter(code):
    """Installs a seccomp filter."""
    mode_filter = 2
    called(libc.prctl(PR_SET_SECCOMP, mode_filter, ctypes.byref(Filter(len(code) // 8, code)), 0, 0), "seccomp")
