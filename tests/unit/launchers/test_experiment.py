"""nemo-run is imported without what it does not need."""

import subprocess
import sys

SCRIPT = """
import gc, importlib.util, sys
from launchers.experiment import _quick_imports
assert "torch" not in sys.modules, "the launcher itself needs none"
with _quick_imports():
    assert not gc.isenabled()
    try:
        import torch
    except ModuleNotFoundError:
        print("no torch here")
assert gc.isenabled()
print("torch again" if importlib.util.find_spec("torch") else "none at all")
"""


def test_torch_is_out_of_the_way_while_nemo_run_is_imported():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["no torch here", "torch again"], done.stderr


def test_a_torch_that_is_there_already_stays():
    import torch

    from launchers.experiment import _quick_imports

    with _quick_imports():
        assert sys.modules["torch"] is torch
    assert sys.modules["torch"] is torch
