"""The folder for the files of one program, and what becomes of it; runs inside the sandbox, with the standard library.

Without a file system of their own, programs may leave folders without rights and folders in one another that no
recursion reaches. All of them are lifted to the top, so that depth costs neither stack nor descriptors.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from typing import Any

from gtpo_megatron.sandbox.inside.limits import called, libc

MS_NOSUID, MS_NODEV = 2, 4
MNT_DETACH = 2

MAX_INODES = 4096


@contextlib.contextmanager
def files(settings: dict[str, Any]) -> Iterator[str]:
    """A folder for the files of one program, all of whose processes have ended at its end.

    It is a file system of its own, which is taken away with whatever is in it: nothing has to be emptied. Without
    namespaces it is a new folder, which stays where it cannot be removed.
    """
    if settings["is_isolated"]:
        path = settings["folder"].encode()
        size = f"size={settings['file_mib']}m,nr_inodes={MAX_INODES},mode=1777"
        called(libc.mount(b"tmpfs", path, b"tmpfs", MS_NOSUID | MS_NODEV, size.encode()), "mount")
        try:
            yield settings["folder"]
        finally:
            libc.umount2(path, MNT_DETACH)
        return
    folder = new_folder(settings["folder"])
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            remove(folder)


def new_folder(parent: str) -> str:
    """A new folder in another one, to which a program may have done anything; or elsewhere."""
    try:
        os.makedirs(parent, exist_ok=True)
        os.chmod(parent, 0o700)
        return tempfile.mkdtemp(dir=parent)
    except OSError:
        return tempfile.mkdtemp(dir=tempfile.mkdtemp(prefix="programs-"))  # what is above it is no folder of others


def remove(folder: str) -> None:
    """Removes a folder with all in it, and follows no link.

    Raises:
        OSError: something cannot be removed.
    """
    if not is_folder(folder):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder)
        return
    os.chmod(folder, 0o700)
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        while names := os.listdir(top):
            for name in names:
                if is_folder(name, top):
                    lift(name, top)
                else:
                    os.unlink(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def is_folder(name: str, parent: int | None = None) -> bool:
    """Whether it is a folder, and no link to one."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def lift(name: str, top: int) -> None:
    """Removes a folder in ``top``; the folders in it come to be there."""
    os.chmod(name, 0o700, dir_fd=top)
    opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for inner in os.listdir(opened):
            if is_folder(inner, opened):
                os.chmod(inner, 0o700, dir_fd=opened)  # moving a folder changes what is in it
                os.rename(inner, os.urandom(16).hex(), src_dir_fd=opened, dst_dir_fd=top)
            else:
                os.unlink(inner, dir_fd=opened)
    finally:
        os.close(opened)
    os.rmdir(name, dir_fd=top)
