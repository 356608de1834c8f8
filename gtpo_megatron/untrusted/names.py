"""A name that stands in a file, or that a user gives, is a bare name: it leads to nowhere but into its folder."""

from gtpo_megatron.errors import DataError, GTPOError
from gtpo_megatron.untrusted.text import shown

MAX_NAME_BYTES = 255
"""Of a file's name, on every file system in use."""


def bare_name(name: object, where: str, error: type[GTPOError] = DataError) -> str:
    """Returns the name as it is.

    Args:
        name: of a file or folder.
        where: named in errors: what holds the name.
        error: to raise.

    Raises:
        GTPOError: ``error``: it is no text, empty, a path, ``.`` or ``..``, too long, or has control characters.
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
