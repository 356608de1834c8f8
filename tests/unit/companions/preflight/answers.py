"""Functions for children, in a module that imports next to nothing."""

import time


def told(words):
    print("a library that talks")
    return {"words": words}


def breaks():
    raise ValueError("no such board")


def hangs():
    time.sleep(600)
