"""What is known of libraries goes to log.txt, whatever way they write it; what is not is shown."""

import subprocess
import sys

import pytest

from gtpo_megatron.observability.known_warnings import KNOWN, is_known
from gtpo_megatron.observability.logs import LOG_FILE

SEEN = [
    "/x/site-packages/megatron/core/optimizer/__init__.py:24: UserWarning: Transformer Engine and Apex are not "
    "installed. Falling back to Torch optimizers.\n  warnings.warn(\n",
    "/x/megatron/core/models/backends.py:21: UserWarning: Apex is not installed. Falling back to Torch Norm\n",
    "/x/transformer_config.py:1705: UserWarning: full scope is deprecated. Use empty cuda_graph_scope to capture the "
    "whole layer.",
    "/x/layers.py:738: UserWarning: When using async grad allreduce it is recommended to set the environment variable "
    "CUDA_DEVICE_MAX_CONNECTIONS to 1 for maximum speedup",
    "/x/dispatcher.py:138: FutureWarning: `torch.distributed.reduce_op` is deprecated, please use "
    "`torch.distributed.ReduceOp` instead",
    "W1125 10:11:18.826000 14670 .venv/torch/_library/triton.py:53] Triton not available, find_triton_kernels = []",
    "[W1125 10:11:28.195597154 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy for memory allocation on the "
    "NUMA nodes (0). Memory allocations will be strictly bound to these NUMA nodes. (function init_cpu_memory_env)",
]
"""Of a start on a CPU with torch 2.13, Megatron 0.16 and vLLM 0.32."""

UNKNOWN = [
    "CUDA error: an illegal memory access was encountered",
    "[W1125 utils.cpp:70] Warning: something new (function another)",
    "Apex",
    "RuntimeWarning: invalid value encountered in divide",
]


@pytest.mark.parametrize("message", SEEN)
def test_known(message):
    assert is_known(message)


@pytest.mark.parametrize("message", UNKNOWN)
def test_unknown(message):
    assert not is_known(message)


def test_every_kind_has_a_reason():
    assert all(len(reason.split()) > 2 for reason in KNOWN.values())


def test_records_of_python(tmp_path):
    code = f"""
import logging, warnings
from pathlib import Path
from gtpo_megatron.observability.logs import set_up_logs
set_up_logs(run_folder=Path({str(tmp_path)!r}))
for text in {SEEN + UNKNOWN!r}:
    warnings.warn(text)
    logging.getLogger("vllm").warning(text)
logging.getLogger("vllm").warning("%s: Failed to load weights", "Llama3RotaryEmbedding")
logging.getLogger("vllm").warning("%s: Failed to load weights", "QKVParallelLinear")
"""
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr
    logged = (tmp_path / LOG_FILE).read_text(encoding="utf-8")
    assert all(text.splitlines()[0] in logged for text in SEEN + UNKNOWN)
    assert all(text in shown for text in UNKNOWN)
    assert "RotaryEmbedding" not in shown + logged
    assert "QKVParallelLinear: Failed to load weights" in shown
    assert not any(text.splitlines()[0] in shown for text in SEEN)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_written_past_python(tmp_path, fails):
    """By C++, and by a process that the library has started and that outlives its start."""
    code = f"""
import os, subprocess, sys, time
from pathlib import Path
from gtpo_megatron.observability.known_warnings import expected_warnings_to_log
from gtpo_megatron.observability.logs import set_up_logs
set_up_logs(run_folder=Path({str(tmp_path)!r}))
lines = {[line.splitlines()[0] for line in SEEN + UNKNOWN]!r}
try:
    with expected_warnings_to_log():
        for line in lines:
            os.write(2, line.encode() + b"\\n")
        child = subprocess.Popen([sys.executable, "-c", "import os, time; time.sleep(0.5); os.write(2, b'late words')"])
        if {fails}:
            raise ValueError("no engine")
except ValueError as error:
    sys.stderr.write(f"after: {{error}}\\n")
else:
    sys.stderr.write("after: well\\n")
child.wait()
time.sleep(0.3)
"""
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr
    logged = (tmp_path / LOG_FILE).read_text(encoding="utf-8")
    unknown = "".join(f"{line}\n" for line in UNKNOWN)
    assert shown == f"{unknown}after: {'no engine' if fails else 'well'}\nlate words"
    assert all(" ".join(line.split()[:8]) in logged for line in SEEN)


def test_nothing_of_the_terminal_has_changed_afterwards(capfd):
    code = (
        "import os; from gtpo_megatron.observability.known_warnings import expected_warnings_to_log\n"
        "before = os.fstat(2)\n"
        "with expected_warnings_to_log(): pass\n"
        "assert os.fstat(2).st_ino == before.st_ino"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
