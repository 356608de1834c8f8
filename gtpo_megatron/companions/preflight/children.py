"""Measurements in a process of their own: they leave no trace in the run's process, and one that hangs is ended.

A child gets function, arguments and module path as a JSON object on standard input, and prints what the function
returns as JSON on a line of its own.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from gtpo_megatron.errors import WorkerError

SHOWN_CHARACTERS = 400
"""Of the last line of a failed child."""

_BOOTSTRAP = (
    "import json, sys; call = json.load(sys.stdin); sys.path[:] = call['path']; "
    "from gtpo_megatron.companions.preflight.children import answer; answer(call)"
)

MARK = "preflight answer: "
"""Before the answer, since libraries print too."""


def in_child(_instance: object, function: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
    """Runs in any process of a run: calls a function in a child of it, which sees the same GPUs.

    Args:
        function: ``module:name``.
        arguments: values by name, as JSON can hold them.
        timeout_s: time of the child.

    Raises:
        WorkerError: it failed, or took longer.
    """
    call = json.dumps({"path": sys.path, "function": function, "arguments": dict(arguments)})
    try:
        done = subprocess.run(
            [sys.executable, "-c", _BOOTSTRAP],
            input=call,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerError(
            f"{function} has not ended within {timeout_s:.0f} s; the device hangs, or is in use"
        ) from error
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        printed = (done.stderr or done.stdout).strip().splitlines()
        why = printed[-1][:SHOWN_CHARACTERS] if printed else "without a word"
        raise WorkerError(f"{function} ended with status {done.returncode}: {why}")
    return json.loads(answers[-1].removeprefix(MARK))


def answer(call: Mapping[str, Any]) -> None:
    """Calls a function in a child, and prints its result for the parent."""
    module, _, name = call["function"].partition(":")
    result = getattr(importlib.import_module(module), name)(**call["arguments"])
    sys.stdout.write(f"{MARK}{json.dumps(result)}\n")
