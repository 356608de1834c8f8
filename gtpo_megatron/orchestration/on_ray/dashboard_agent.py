"""A raylet's dashboard agent, in the place of Ray's: it offers nothing, which is said by ports of -1, as Ray's can.

The raylet runs it by its path, with what Ray's gets, and ends if it is not up within 15 s, which Ray's own, with 2 s of
imports, is not on a busy machine. Standard library only.
"""

import argparse
import os
import select
from contextlib import suppress
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""Names of Ray's (2.60) files of ports, which the raylet waits for."""


def main() -> None:
    """Entry point; ends with the raylet, its parent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--session-dir", type=Path, required=True)
    options, _ = parser.parse_known_args()
    for name in PORTS:
        file = options.session_dir / f"{name}_{options.node_id}"
        unread = file.with_name(f".{file.name}")
        unread.write_text("-1", encoding="ascii")
        unread.rename(file)
    with suppress(ProcessLookupError):
        poll = select.poll()
        poll.register(os.pidfd_open(os.getppid()), select.POLLIN)
        poll.poll()


if __name__ == "__main__":
    main()
