"""The process that generates rows of one task of reasoning-gym: ``python -m`` this module, with what is asked as JSON.

It writes a line of JSON for each row, or one that says why there is none.
"""

import ctypes
import json
import os
import random
import signal
import sys
from collections.abc import Mapping
from typing import Any

from gtpo_megatron.config.reasoning_task import reasoning_task
from gtpo_megatron.data.rows import plain_value
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.supervision.worker import PR_SET_PDEATHSIG


def main() -> None:
    """Generates the rows that the argument asks for."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    told = json.loads(sys.argv[1])
    name, options, size, seed = told["task"], dict(told["options"]), told["size"], told["seed"]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)  # some generators print

        def say(**content: object) -> None:
            lines.write(json.dumps(content) + "\n")
            lines.flush()

        try:
            task = reasoning_task(name, options, size=size, seed=seed)
        except ConfigError as error:
            say(refused=str(error))
            return
        try:
            for index in range(size):
                random.seed(seed + index)  # a few draw from Python's own generator too
                say(record=_record(name, options, task[index]))
        except Exception as error:  # noqa: BLE001 - whatever a generator raises
            say(raised=f"{type(error).__name__}: {error}")


def _record(name: str, options: Mapping[str, str], entry: Mapping[str, Any]) -> dict[str, object]:
    metadata = plain_value(_native(entry.get("metadata") or {}))
    assert isinstance(metadata, dict)
    return {
        "question": str(entry["question"]),
        "answer": plain_value(_native(entry["answer"])),
        "source": name,
        "task": {"name": name, "options": dict(options)},
        "difficulty": metadata.get("difficulty"),
        "metadata": metadata,
    }


def _native(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's, inside of containers too; sets as lists."""
    if isinstance(value, Mapping):
        return {key: _native(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_native(child) for child in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_native, value), key=repr)
    return value.tolist() if hasattr(value, "tolist") else value


if __name__ == "__main__":
    main()
