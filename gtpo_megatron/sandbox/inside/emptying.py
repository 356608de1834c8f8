"""Empties a folder of whatever a program has left in it; runs inside the sandbox too, with the standard library only.

Where programs have no file system of their own, they may leave folders without rights and folders in one another that
no recursion reaches. All of them are lifted to the top, so that depth costs neither stack nor descriptors.
"""

import contextlib
import os
import stat


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
