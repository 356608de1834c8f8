"""What ``module:function`` or ``FILE.py:function`` names: recipes, rewards, algorithms and studies are found here."""

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import printable, read_bytes

_ENDING = ".py"

_FILES: dict[str, Path] = {}
"""Modules that were loaded from a file of theirs, by their names in ``sys.modules``."""


def named_function(name: str, *, what: str, example: str) -> Callable[..., Any]:
    """Finds the function called ``module:function`` or ``FILE.py:function``.

    A file is loaded once, and its folder is added to the end of the module path, so that it can import its neighbours.

    Args:
        name: name as it was configured.
        what: the name is of, for errors.
        example: a right name, for errors.

    Raises:
        ConfigError: the name has another form, there is no such module or file, it does not import, or it has no such
            callable.
    """
    module_name, colon, attribute = name.partition(":")
    where = f"{what} {name!r}"
    if not (colon and module_name and attribute):
        raise ConfigError(
            f"{where}: got no colon with something on both sides; must be written module:function or FILE.py:function, "
            f"such as {example}"
        )
    module = _module(module_name, where)
    function = getattr(module, attribute, None)
    if not callable(function):
        own = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__ and not key.startswith("_")
        )
        close = difflib.get_close_matches(attribute, own, n=1)
        meant = f"; did you mean {module_name}:{close[0]}?" if close else ""
        raise ConfigError(
            f"{where}: {module_name} lacks it; it has {', '.join(own) or 'no function of its own'}{meant}"
        )
    found: Callable[..., Any] = function
    return found


def named_file(name: str) -> Path | None:
    """The file of ``FILE.py:function``; None for ``module:function``."""
    module_name = name.partition(":")[0]
    is_file = "/" in module_name or module_name.startswith(".") or module_name.endswith(_ENDING)
    return Path(module_name).expanduser() if is_file else None


def name_of(kind: type) -> str:
    """The name by which :func:`named_function` finds a class in every process: of a file, by its whole path."""
    return f"{_FILES.get(kind.__module__, kind.__module__)}:{kind.__qualname__}"


def called(function: Callable[[], Any], name: str, *, what: str) -> Any:
    """What a function of a person's own returns.

    Raises:
        ConfigError: it raised; one line says what.
    """
    try:
        return function()
    except ConfigError:
        raise
    except Exception as error:  # the user's function, like their module
        raise ConfigError(f"{what} {name!r}: it raised {_line(error)}") from error


def _module(module_name: str, where: str) -> ModuleType:
    """The module, or the file's module.

    Raises:
        ConfigError: there is none, or it does not import.
    """
    is_file = named_file(module_name) is not None
    try:
        return _loaded(module_name, where) if is_file else importlib.import_module(module_name)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        if not is_file and error.name is not None and module_name.startswith(error.name):
            raise ConfigError(
                f"{where}: there is no module {error.name!r} on the module path{_package_seen(error.name)}"
            ) from error
        raise ConfigError(f"{where}: importing {module_name} failed: {_line(error)}") from error
    except Exception as error:  # the user's module: whatever it raises, the sentence names it
        raise ConfigError(f"{where}: importing {module_name} failed: {_line(error)}") from error


def _package_seen(module_name: str) -> str:
    """Which folder the package of a missing module is: a folder where a person stands can hide an installed one."""
    package = module_name.rpartition(".")[0]
    folders = list(getattr(sys.modules.get(package), "__path__", ()))
    if not folders:
        return ""
    return f"; {package} is {folders[0]} here: for a module in another folder of that name, give FILE.py:function"


def _loaded(path: str, where: str) -> ModuleType:
    """The module of a file, loaded once in this process."""
    file = Path(path).expanduser().resolve()
    if file.suffix != _ENDING:
        raise ConfigError(f"{where}: {path!r} is a path without the ending {_ENDING}; must be FILE.py:function")
    if not file.is_file():
        raise ConfigError(f"{where}: there is no file {path} in {Path.cwd()}; give the path of a Python file")
    # two files of one name are two modules, and one called random.py is not the standard library's
    name = f"{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "the ending is that of Python"
    assert spec.loader is not None, "a file has a loader"
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name], _FILES[name] = module, file
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name], _FILES[name]
        raise
    return module


def named_module(name: str, *, what: str) -> ModuleType:
    """The module or file of ``module:function``.

    Raises:
        ConfigError: there is none, or it does not import.
    """
    return _module(name.partition(":")[0], f"{what} {name!r}")


def source_sha256(name: str, *, what: str) -> str:
    """Digest of the file that ``module:function`` or ``FILE.py:function`` names; what it imports is not in it.

    Args:
        name: name as it was configured.
        what: the name is of, for errors.

    Returns:
        64 hexadecimal digits; "" for this package's own functions, which its version tells apart, and for modules
        without a file.

    Raises:
        ConfigError: there is no such module or file, it does not import, or cannot be read.
    """
    module = named_module(name, what=what)
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    return hashlib.sha256(read_bytes(Path(file), error=ConfigError)).hexdigest()


def _line(error: Exception) -> str:
    """An exception as one line, with the place in a file where it has one (a syntax error)."""
    return f"{type(error).__name__}: {printable(error)}"
