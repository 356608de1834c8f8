"""The record of a subcommand."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.cli.recipe import AnyRecipeOptions
from gtpo_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of ``gtpo-megatron``.

    Attributes:
        usage: its lines in the overview: a synopsis, then an indented description.
        run: takes the arguments after the command's name and returns the exit status.
        interrupted: hint after Ctrl-C, if the command can be resumed.
        options: class of its options, for completion, or a union of one per subcommand.
        recipe: its own recipe, if it is a command of one; empty: the user names one, or needs none.
    """

    usage: str
    run: Callable[[Sequence[str]], int]
    interrupted: str = ""
    options: Any = None
    recipe: str = ""

    @property
    def needs_recipe(self) -> bool:
        """Whether a recipe must follow."""
        return isinstance(self.options, type) and issubclass(self.options, AnyRecipeOptions) and not self.recipe


_RUNS = "cpu (runs without a GPU) or gpu"
EXTRAS = {"torch": _RUNS, "megatron": _RUNS, "vllm": _RUNS, "scipy": "study", "gguf": "gguf", "nemo_run": "launch"}
"""Top-level module -> the extras that bring it."""


def missing_library(module: str, command: str) -> str | None:
    """The sentence for a module of an extra that is not installed; None if no extra has it.

    Args:
        module: as ``ModuleNotFoundError.name`` has it.
        command: command that needs it.
    """
    top = module.partition(".")[0]
    if top not in EXTRAS:
        return None
    first = EXTRAS[top].split()[0]
    return (
        f"{command} needs {top}, which is not installed; it comes with the extra {EXTRAS[top]}: "
        f"uv pip install 'gtpo-megatron[{first}]'"
    )


def require_libraries(*modules: str, command: str) -> None:
    """Checks that libraries are installed, without importing them.

    Raises:
        ConfigError: one is not.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(missing_library(module, command) or f"{command} needs {module}, which is not installed")
