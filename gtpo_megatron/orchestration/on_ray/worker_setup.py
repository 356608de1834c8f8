"""Ray's script for the start of a worker, in the place of its own: asks a server of ours, and goes on as Ray does.

The raylet runs it by its path, with what Ray's own script gets. A worker whose environment names no server, or whose
server is gone, is started by that one. Standard library only: Ray's own takes a second of imports.
"""

import array
import json
import os
import socket
import sys
from pathlib import Path

SERVER = "GTPO_MEGATRON_WORKER_SERVER"
"""Environment variable of a worker: the path of the socket of the server that makes it."""

_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def is_made(arguments: list[str]) -> bool:
    """Whether a server has made the worker of these arguments."""
    context = next((one.removeprefix(_CONTEXT) for one in arguments if one.startswith(_CONTEXT)), "{}")
    variables = (json.loads(context) or {}).get("env_vars") or {}
    if SERVER not in variables:
        return False
    request = {
        "arguments": [one for one in arguments if not one.startswith((_CONTEXT, _LANGUAGE))],
        "variables": {**os.environ, **variables},
        "folder": str(Path.cwd()),
        "oom_score": Path("/proc/self/oom_score_adj").read_text(encoding="ascii"),
    }
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(variables[SERVER])
            streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (0, 1, 2)))]
            server.sendmsg([b"+"], streams)
            server.sendall(json.dumps(request).encode())
            server.shutdown(socket.SHUT_WR)
            return server.recv(16) != b""
    except OSError:
        return False


def main() -> None:
    """Entry point; arguments are those of Ray's script, of which the worker's script is one."""
    arguments = sys.argv[1:]
    if not is_made(arguments):
        worker = next(Path(one) for one in arguments if one.endswith("/default_worker.py"))
        os.execv(sys.executable, [sys.executable, str(worker.with_name("setup_worker.py")), *arguments])


if __name__ == "__main__":
    main()
