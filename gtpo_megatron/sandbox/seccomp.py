"""The system calls that a program in the sandbox may not make, as a BPF program for seccomp.

The filter is a list of refusals: each gets EPERM, so that a program that tries one goes on and fails by itself. A
program of another architecture, or of the x32 ABI, whose numbers differ, is killed. ``clone3`` gets ENOSYS, because its
flags are in memory where a filter cannot look; the C library then uses ``clone``. ``prlimit`` is allowed on oneself: on
process 1 of the namespace, which is the same user's, it would end what watches the program.
"""

import struct

ALLOW, KILL, REFUSE, MISSING = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38
"""Return values: allow, kill the process, EPERM, ENOSYS."""

MACHINE = "x86_64"
_ARCHITECTURE = 0xC000003E
_X32_BIT = 0x40000000
_THREAD_FLAG = 0x00010000
_NAMESPACE_FLAGS = 0x7E020080
"""All CLONE_NEW* flags."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

CLONE, CLONE3, PRLIMIT = 56, 435, 302

REFUSED = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438,
    "pidfd_open": 434, "process_madvise": 440,
    "socket": 41, "connect": 42, "bind": 49, "listen": 50,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "move_mount": 429, "open_tree": 428,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "mknod": 133, "mknodat": 259,
    "unshare": 272, "setns": 308, "open_by_handle_at": 304, "name_to_handle_at": 303, "quotactl": 179, "acct": 163,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "add_key": 248, "request_key": 249, "keyctl": 250,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
    "reboot": 169, "swapon": 167, "swapoff": 168, "syslog": 103, "iopl": 172, "ioperm": 173, "modify_ldt": 154,
    "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "sethostname": 170,
    "setdomainname": 171, "personality": 135, "vhangup": 153, "lookup_dcookie": 212, "fanotify_init": 300,
    "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "memfd_secret": 447,
    "migrate_pages": 256, "move_pages": 279, "mbind": 237, "set_mempolicy": 238,
}  # fmt: skip
"""Refused calls by name, with their numbers on x86-64."""

_NEW_PROCESS = {"fork": 57, "vfork": 58}


def build_filter(*, may_fork: bool) -> bytes:
    """The filter as an array of ``struct sock_filter``.

    Args:
        may_fork: whether it may start processes, as a compiler does; a program may start threads only.
    """
    refused = [*REFUSED.values(), *(() if may_fork else _NEW_PROCESS.values())]
    code = [
        (_LOAD, 0, 0, 4),  # architecture
        (_EQUAL, 1, 0, _ARCHITECTURE),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, 0),  # number of the call
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, KILL),
        (_EQUAL, 0, 1, CLONE3),
        (_RETURN, 0, 0, MISSING),
    ]
    for number in refused:
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, REFUSE)]
    code += [
        (_EQUAL, 0, 4, PRLIMIT),
        (_LOAD, 0, 0, 16),  # process, the first argument: 0 is its own
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, REFUSE),
        (_RETURN, 0, 0, ALLOW),
    ]
    code += [
        (_EQUAL, 0, 5 if not may_fork else 3, CLONE),
        (_LOAD, 0, 0, 16),  # flags, lower half of the first argument
        (_ANY_BIT, 0, 1, _NAMESPACE_FLAGS),
        (_RETURN, 0, 0, REFUSE),
    ]
    if not may_fork:
        code += [(_ANY_BIT, 1, 0, _THREAD_FLAG), (_RETURN, 0, 0, REFUSE)]
    code.append((_RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *one) for one in code)
