"""Warnings of libraries about what this package does on purpose: for ``log.txt``, not for a person at a terminal.

Everything else that a library warns of is shown.
"""

import contextlib
import fcntl
import logging
import os
import re
import threading
from collections.abc import Iterator

FILE_ONLY = {"is_for_file_only": True}
"""``extra`` of a record that the terminal has in another form, or need not have."""

KNOWN: dict[str, str] = {
    r"Transformer Engine and Apex are not installed": "Megatron's own code in their place is what a CPU build uses",
    r"Apex is not installed\. Falling back": "its own norms, likewise",
    r"full scope is deprecated\. Use empty cuda_graph_scope": "Megatron's own default; no CUDA graph is captured",
    r"CUDA_DEVICE_MAX_CONNECTIONS": "Megatron's advice for overlap on a GPU; docs/launching.md has what is set there",
    r"`torch\.distributed\.reduce_op` is deprecated": "vLLM looks at every attribute of torch, also at this one",
    r"Triton not available, find_triton_kernels": "torch without a GPU has none",
    r"NUMA binding: Using MEMBIND policy": "vLLM binds memory to this process's cores, which is wanted",
    r"\[W\d+ .*Warning: .*init_cpu_memory_env": "the same, without its first line",
    r"The global random seed is set to": "a response's seed is its own, and the trainer is another process",
    r"does not officially support disabling chunked prefill": "with it vLLM would rewind a CPU's random generator",
    r"Enforce eager set, disabling torch\.compile": "set by this package on a CPU, where compiling takes longer",
    r"Inductor compilation was disabled by user settings": "the user is this package, for the same reason",
    r"Triton is not installed\. triton-cpu is expected": "vLLM's own kernels for CPUs do without",
    r"Model Runner V2 requires Triton": "the first one is meant on a CPU",
    r"Reset SSM cache type to float32": "of layers that no supported model has",
    r"lib(tcmalloc|iomp) is not found in LD_PRELOAD": "vLLM's advice for speed; docs/evaluation.md passes it on",
    r"Attempted to load weight .* with dtype .* into parameter with dtype": "`engine.dtype` is what was asked for",
    r"doesn't allow to use `torch\.set_num_threads` after the thread binding": "vLLM binds the threads, as is meant",
    r"sleep mode is not supported on CPU": "engines sleep where there is a GPU to share",
    r"Loading safetensors checkpoint shards": "a progress bar of vLLM's; the start says what it waits for itself",
    r"destroy_process_group\(\) was not called": "the process ends, and its groups with it",
}
"""Part of the message, as a pattern -> why it is of no use to whoever runs this."""

_PATTERN = re.compile("|".join(KNOWN))

_SILENT = re.compile(r"RotaryEmbedding: Failed to load weights")
"""vLLM says it at every push: rotary embeddings have no weights, and what was pushed is checked by checksums."""


def is_known(message: str) -> bool:
    """Whether the message of a record, or a line on standard error, is of a kind in ``KNOWN``."""
    return _PATTERN.search(message) is not None


def is_silent(message: str) -> bool:
    """Whether the message of a record is not even for ``log.txt``."""
    return _SILENT.search(message) is not None


@contextlib.contextmanager
def expected_warnings_to_log() -> Iterator[None]:
    """Within the block known lines that anything writes to standard error go to ``log.txt`` alone, others through.

    For the start of a library in this process, parts of which write past Python's logging. What it starts keeps the
    filtered output for good.
    """
    read, write = os.pipe()
    with contextlib.suppress(OSError):  # the more room, the less a library waits that writes with Python's lock held
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    terminal = os.dup(2)
    os.dup2(write, 2)
    os.close(write)
    done = threading.Event()
    threading.Thread(target=_sort, args=(read, terminal, done), name="known warnings", daemon=True).start()
    try:
        yield
    finally:
        os.write(2, _END)
        os.dup2(terminal, 2)
        done.wait(_FLUSH_S)


_END = b"\0gtpo_megatron: end of the start\0\n"
_PIPE_BYTES = 1 << 20
_FLUSH_S = 5.0
"""In which what was written has come through."""


def _sort(read: int, terminal: int, done: threading.Event) -> None:
    """Passes lines on until nobody can write any more; then closes its ends."""
    with os.fdopen(read, "rb") as lines, os.fdopen(terminal, "wb", buffering=0) as shown:
        was_known = False
        for line in lines:
            if line == _END:
                done.set()
                continue
            text = line.decode("utf-8", "replace").strip()
            was_known = is_known(text) or (was_known and not text)  # with the empty line that follows it
            if was_known and text:
                logging.getLogger(__name__).warning("%s", text, extra=FILE_ONLY)
            elif not was_known:
                with contextlib.suppress(OSError):  # nobody reads it
                    shown.write(line)
    done.set()
