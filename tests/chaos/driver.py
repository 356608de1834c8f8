"""``gtpo-megatron``, but that it also writes down the stage it is in, so that a fault can be put into it.

``python -m tests.chaos.driver STAGE_FILE train ...``
"""

import os
import sys

from gtpo_megatron.cli import main
from gtpo_megatron.observability.timers import StageTimers

WIDTH = 40


def note_stages(path):
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
    tell = StageTimers._tell

    def tell_and_note(self):
        tell(self)
        if self.current:  # between two stages the last one counts
            os.pwrite(descriptor, f"{self.current:<{WIDTH}}".encode(), 0)

    StageTimers._tell = tell_and_note


if __name__ == "__main__":
    note_stages(sys.argv.pop(1))
    main()
