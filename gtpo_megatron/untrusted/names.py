"""Checks names of files and folders that come from files or users."""

from gtpo_megatron.errors import DataError, GTPOError
from gtpo_megatron.untrusted.text import shown

MAX_NAME_BYTES = 255
"""Longest name on common file systems."""


def bare_name(name: object, where: str, error: type[GTPOError] = DataError) -> str:
    """Checks that a name does not lead out of its folder, and returns it.

    Args:
        name: name of a file or folder.
        where: place for messages.
        error: class of errors raised.

    Raises:
        GTPOError: ``error``: it is not text, empty, a path, ``.`` or ``..``, too long, or has control characters.
    """
    if not isinstance(name, str) or not name:
        raise error(f"{where}: got {shown(name)}, expected a name")
    if "/" in name or "\\" in name or name in (".", ".."):
        raise error(f"{where}: got {shown(name)}, expected a bare name, which leads into no other folder")
    if not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise error(
            f"{where}: got {shown(name)}, expected a name of at most {MAX_NAME_BYTES} bytes without control characters"
        )
    return name
