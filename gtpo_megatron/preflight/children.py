"""Measurements in a process of their own: they leave no trace in the run's process, and one that hangs is ended.

``python -m gtpo_megatron.preflight.children MODULE:FUNCTION`` calls the function with the JSON object on standard
input, and prints what it returns as JSON on the last line.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from gtpo_megatron.errors import WorkerError

SHOWN_CHARACTERS = 400
"""Of what a failed child has said."""

MARK = "preflight answer: "
"""Before the answer, since libraries print too."""


def in_child(_held: object, function: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
    """A question to any process of the run: calls a function in a child of it, which sees the same GPUs.

    Args:
        function: ``module:name``.
        arguments: by name, as JSON can hold them.
        timeout_s: after which the child is ended.

    Raises:
        WorkerError: it failed, or took longer.
    """
    command = [sys.executable, "-m", __name__, function]
    try:
        done = subprocess.run(
            command, input=json.dumps(dict(arguments)), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerError(
            f"{function} has not ended within {timeout_s:.0f} s; the device hangs, or is in use"
        ) from error
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        said = (done.stderr or done.stdout).strip().splitlines()
        why = said[-1][:SHOWN_CHARACTERS] if said else "without a word"
        raise WorkerError(f"{function} ended with status {done.returncode}: {why}")
    return json.loads(answers[-1].removeprefix(MARK))


def main() -> None:
    """Entry of a child."""
    module, _, name = sys.argv[1].partition(":")
    answer = getattr(importlib.import_module(module), name)(**json.load(sys.stdin))
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
