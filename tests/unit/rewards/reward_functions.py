"""Reward functions that misbehave; the pool's workers import them by name."""

import mmap
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


def tell_pid(path):
    """Whole at once: who sees the file may end this process before its next instruction."""
    unseen = Path(f"{path}.{os.getpid()}")
    unseen.write_text(str(os.getpid()))
    unseen.replace(path)


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
    if word == "daemon":  # a grandchild in a session of its own, whose parent has ended
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                tell_pid(rest)
                os.execlp("sleep", "sleep", "60")
            os._exit(0)
        while not Path(rest).exists():
            time.sleep(0.01)
    if word == "flee":  # a chain of processes, each of which is gone when one looks at it
        if os.fork() == 0:
            os.setsid()
            tell_pid(rest)
            end = time.monotonic() + 60.0
            while time.monotonic() < end:
                if os.fork():
                    os._exit(0)
            os._exit(0)
        while not Path(rest).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "daemon-and-die":
        obey(f"daemon {rest}", answer)
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "daemon-and-hang":
        obey(f"daemon {rest}", answer)
        time.sleep(60)
    if word == "share":
        shared = mmap.mmap(-1, int(rest) << 20)
        for start in range(0, len(shared), 4096):
            shared[start] = 1
        time.sleep(5)
    if word == "allocate-in-children":  # each of the four is within the limit of one process
        allocate = f"b = bytearray({int(rest) << 20}); b[::4096] = bytes(len(b[::4096])); import time; time.sleep(60)"
        children = [subprocess.Popen([sys.executable, "-c", allocate]) for _ in range(4)]
        children[0].wait()
    if word == "write-to-2":
        os.write(2, b"x" * int(rest))
    if word == "child-writes":
        subprocess.run(["head", "-c", rest, "/dev/zero"], stdout=2, check=True)
    if word == "close-2":
        os.close(2)
    if word == "tell-pid":
        tell_pid(rest)
    return 1.0
