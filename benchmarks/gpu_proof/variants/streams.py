"""Two streams that hand buffers to each other, and multiprocessors that products leave to the second one."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class Streams:
    """The caller's stream, which computes products, and a second one, which reads what they have made.

    The second stream begins after all that the first one has been given, and the first one goes on after all that the
    second one has been given. Tensors that are made before the block and die after it may be used on both; those
    that are made in `reading` belong to the second one. Without a second stream every method is about order only.

    Args:
        device: of the tensors.
        is_wanted: whether there is a second stream; on a CPU there is none.
        is_reader_first: the second stream's programs start before the first one's.
    """

    def __init__(self, device: torch.device, *, is_wanted: bool, is_reader_first: bool) -> None:
        self._first = torch.cuda.current_stream(device) if device.type == "cuda" and is_wanted else None
        self._second = None if self._first is None else _second_stream(device, is_reader_first)
        self._count = -1
        self._read: dict[int, Any] = {}
        self._place = 0

    def __enter__(self) -> "Streams":
        if self._second is not None:
            self._second.wait_stream(self._first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first is not None:
            self._first.wait_stream(self._second)

    def next(self, buffers: Sequence[Tensor]) -> Tensor:
        """The next buffer to write, on the first stream, as soon as the second one has read it."""
        self._count += 1
        self._place = self._count % len(buffers)
        if self._first is not None and self._place in self._read:
            self._first.wait_event(self._read[self._place])
        return buffers[self._place]

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """What is called here reads the last buffer, on the second stream, as soon as it is written."""
        if self._second is None:
            yield
            return
        self._second.wait_stream(self._first)
        with torch.cuda.stream(self._second):
            yield
            self._read[self._place] = self._second.record_event()

    def mark(self) -> Any:
        """What the second stream has been given up to now, for `wait`."""
        return None if self._second is None else self._read[self._place]

    def wait(self, mark: Any) -> None:
        """The first stream goes on when the second one has come so far."""
        if self._first is not None:
            self._first.wait_event(mark)


@functools.cache
def _second_stream(device: torch.device, is_first: bool) -> Any:
    """One for all calls, so that the allocator finds its blocks again."""
    return torch.cuda.Stream(device, priority=-1 if is_first else 0)


@contextlib.contextmanager
def by_cublaslt(device: torch.device, *, is_wanted: bool, carved: int = 0) -> Iterator[None]:
    """Products are cuBLASLt's, whose choice of kernels is its own.

    Args:
        device: of the products; on a CPU nothing changes.
        is_wanted: False: they stay with torch's choice, unless ``carved`` asks for it.
        carved: multiprocessors that they leave to others.
    """
    if device.type != "cuda" or not (is_wanted or carved):
        yield
        return
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(carved or None)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library(library)
