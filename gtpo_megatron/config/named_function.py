"""What ``module:function`` names: recipes, rewards and studies are all found here."""

import difflib
import importlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import printable


def named_function(name: str, *, what: str, example: str) -> Callable[..., Any]:
    """Imports the function called ``module:function``.

    Args:
        name: as a person wrote it.
        what: the name is of, for errors.
        example: of a right one, for errors.

    Raises:
        ConfigError: the name has another form, the module does not import, or it has no such callable.
    """
    module_name, colon, attribute = name.partition(":")
    where = f"{what} {name!r}"
    if not (colon and module_name and attribute):
        raise ConfigError(
            f"{where}: got no colon with something on both sides; must be written module:function, such as {example}"
        )
    if "/" in module_name or module_name.startswith(".") or module_name.endswith(".py"):
        stem = PurePath(module_name).stem or "mine"
        raise ConfigError(
            f"{where}: {module_name!r} is a file, expected a module; in that file's folder, write {stem}:{attribute}"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigError(f"{where}: there is no module {error.name!r} on the module path") from error
        raise ConfigError(f"{where}: importing {module_name} failed: {_line(error)}") from error
    except Exception as error:  # the user's module: whatever it raises, the sentence names it
        raise ConfigError(f"{where}: importing {module_name} failed: {_line(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        own = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module_name and not key.startswith("_")
        )
        close = difflib.get_close_matches(attribute, own, n=1)
        meant = f"; did you mean {module_name}:{close[0]}?" if close else ""
        raise ConfigError(
            f"{where}: {module_name} lacks it; it has {', '.join(own) or 'no function of its own'}{meant}"
        )
    found: Callable[..., Any] = function
    return found


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


def _line(error: Exception) -> str:
    """An exception as one line, with the place in a file where it has one (a syntax error)."""
    return f"{type(error).__name__}: {printable(error)}"
