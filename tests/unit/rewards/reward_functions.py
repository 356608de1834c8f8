"""Reward functions that misbehave; the pool's workers import them by name."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NOT_A_FUNCTION = 3


def echo(response, answer):
    """The number the response is."""
    return float(response)


def obey(response, answer):  # noqa: C901 - one branch a misdeed
    """Does what the response says."""
    word, _, rest = response.partition(" ")
    if word == "hang":
        while True:
            pass
    if word == "sleep":
        time.sleep(float(rest))
    if word == "hang-in-c":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        (3 ** (10**8)) ** 50  # no byte code runs meanwhile, so no Python handler could interrupt it
    if word == "raise":
        raise ValueError(rest)
    if word == "exit":
        sys.exit(3)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "print":
        print("x" * int(rest))
    if word == "allocate":
        bytearray(int(rest) << 20)
    if word == "allocate-bit-by-bit":
        [b"z" * (16 << 20) for _ in range(int(rest) // 16)]
    if word == "hang-up":
        os.closerange(3, 256)
        while True:
            time.sleep(1)
    if word == "child":
        child = subprocess.Popen(["sleep", "60"])
        Path(rest).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    if word == "wait-for":
        while not Path(rest).exists():
            time.sleep(0.01)
    if word == "tell-pid":
        Path(rest).write_text(str(os.getpid()))
    return 1.0
