"""The child's side of the reward pool: grades the rows of one call at a time until its parent ends.

It is a new interpreter instead of a multiprocessing child, so that the parent's main module is not imported again.
"""

import contextlib
import json
import os
import sys
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from gtpo_megatron.config.reward import JudgeConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.judge.client import JudgeSetup
from gtpo_megatron.rewards.function import resolve_rewards, takes_several
from gtpo_megatron.rewards.grade import RewardCaller
from gtpo_megatron.supervision.worker import limit_memory


class Ready(NamedTuple):
    """The first message of a worker, which alone imports the functions.

    Attributes:
        process_id: its own.
        takes_several: a call may have several rows.
        is_async: a function ends its late rows itself.
    """

    process_id: int
    takes_several: bool
    is_async: bool


def main() -> None:
    """Entry point of the child, whose argument is JSON: a descriptor and the limits.

    It answers a list of ``RewardRequest`` with a list of ``Verdict`` until the connection is closed; before it, with
    the seconds that they may take where that is more than the limit of a row.
    """
    told = json.loads(sys.argv[1])
    limits = told["limits"]
    connection: Connection[Any, Any] = Connection(told["descriptor"])
    try:
        functions = resolve_rewards(limits["function"])
    except ConfigError as error:
        connection.send(str(error))
        return
    judge = JudgeSetup(**limits["judge"] | {"config": JudgeConfig(**limits["judge"]["config"])})
    caller = RewardCaller(
        functions,
        timeout_s=limits["timeout_s"],
        sandbox=limits["sandbox"],
        packages=limits["packages"],
        judge=judge,
    )
    if limits["memory_limit_mib"]:
        limit_memory(limits["memory_limit_mib"])
    connection.send(Ready(os.getpid(), takes_several(functions), any(one.is_async for one in functions)))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            requests = connection.recv()
            if (limit_s := caller.limit_s(requests)) > limits["timeout_s"]:
                connection.send(limit_s)
            verdicts = caller.grade(requests)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # the function may have closed them
                    stream.flush()  # what it printed belongs to these rows
            connection.send(verdicts)
