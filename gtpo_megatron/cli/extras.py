"""Which extra of the package holds a library, for one line when it is missing."""

import importlib.util

from gtpo_megatron.errors import ConfigError

_RUNS = "cpu (runs without a GPU) or gpu"
EXTRAS = {"torch": _RUNS, "megatron": _RUNS, "vllm": _RUNS, "scipy": "study", "nemo_run": "launch"}
"""Top-level module -> the extras that bring it."""


def missing_library(module: str, command: str) -> str | None:
    """The sentence for a module of an extra that is not installed; None if no extra has it.

    Args:
        module: as ``ModuleNotFoundError.name`` has it.
        command: that needs it.
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
