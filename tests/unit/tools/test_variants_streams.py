"""Two streams without a GPU: whatever order a device chose, no buffer is read too early or written too early.

Calls run one after the other on the CPU. Each is noted with its stream, what it reads and writes, and a clock of both
streams that events carry over: of two calls that touch the same bytes, one of which writes, one waits for the other.
"""

import contextlib
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch

from benchmarks.gpu_proof.variants.candidate import Candidate
from benchmarks.gpu_proof.variants.streams import Streams
from benchmarks.gpu_proof.variants.turns import Turns
from gtpo_megatron.distributed import tiled_scores
from gtpo_megatron.kernels import torch_tiles
from gtpo_megatron.kernels.tiles import TileKernels
from tests.unit.tools.test_variants import passed


@dataclass
class Stream:
    """Its clock: how many calls of each stream are over before its next one."""

    number: int
    clock: list[int] = field(default_factory=lambda: [0, 0])

    def wait_event(self, event):
        self.clock = [max(pair) for pair in zip(self.clock, event, strict=True)]

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self):
        return list(self.clock)


@dataclass
class Device:
    """Two streams, of which one is current, and the calls that they were given."""

    streams: tuple = field(default_factory=lambda: (Stream(0), Stream(1)))
    current: int = 0
    calls: list = field(default_factory=list)

    @contextlib.contextmanager
    def stream(self, chosen):
        before, self.current = self.current, chosen.number
        try:
            yield
        finally:
            self.current = before

    def note(self, name, reads, writes):
        stream = self.streams[self.current]
        stream.clock[self.current] += 1
        after = tuple(stream.clock)
        self.calls.append((name, self.current, after, [span(one) for one in reads], [span(one) for one in writes]))

    def races(self):
        """Pairs of calls on two streams that touch the same bytes, and neither of which waits for the other."""
        found = []
        for index, (name, stream, clock, reads, writes) in enumerate(self.calls):
            for other, other_stream, other_clock, other_reads, other_writes in self.calls[:index]:
                is_over = clock[other_stream] >= other_clock[other_stream]
                clashes = (writes, other_reads), (writes, other_writes), (reads, other_writes)
                if stream != other_stream and not is_over and any(overlap(*pair) for pair in clashes):
                    found.append((other, name))
        return found


def span(tensor):
    """Bytes that a tensor may touch; rows of a wide gradient are taken as a whole."""
    first = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def overlap(spans, others):
    return any(a < d and c < b for a, b in spans for c, d in others)


@contextlib.contextmanager
def watched(device, *, forgetful=False):
    """Products, kernels and streams of `Turns` are noted; ``forgetful``: buffers are not waited for."""

    def streams(plan, hidden):
        made = Streams(hidden.device, is_wanted=True, is_reader_first=True)
        if plan.buffers > 1:
            made._first, made._second = device.streams
        if forgetful:
            made._read = Forgetful()
        return made

    def matmul(left, right, *, out, inner=tiled_scores._matmul):
        device.note("product", [left, right], [out])
        inner(left, right, out=out)

    def add(total, left, right, inner=tiled_scores._add_matmul_):
        device.note("product of a gradient", [left, right, total], [total])
        inner(total, left, right)

    def reduce(logits, targets, temperature, out, **flags):
        device.note("reduction", [logits], [out])
        torch_tiles.reduce_tile(logits, targets, temperature, out, **flags)

    def gradient(*arguments, **flags):
        device.note("gradient", [arguments[0]], [arguments[6]])
        torch_tiles.gradient_tile(*arguments, **flags)

    kernels = TileKernels(reduce=reduce, gradient=gradient)
    with (
        mock.patch.object(Turns, "_streams", streams),
        mock.patch.object(torch.cuda, "stream", device.stream),
        mock.patch.object(tiled_scores, "_matmul", matmul),
        mock.patch.object(tiled_scores, "_add_matmul_", add),
        mock.patch("benchmarks.gpu_proof.variants.turns.kernels_for", return_value=kernels),
    ):
        yield


class Forgetful(dict):
    """Remembers events for `mark` only."""

    def __contains__(self, key):
        return False


PLANS = [
    Turns(tile_elements=1 << 13, buffers=2),
    Turns(tile_elements=1 << 13, buffers=2, wide_elements=1 << 14),
    Turns(tile_elements=1 << 13, buffers=3, wide_elements=1 << 15),
    Turns(tile_elements=1 << 13, buffers=1, wide_elements=1 << 14),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.buffers} buffers, {plan.wide_elements}")
def test_no_two_streams_touch_the_same_bytes_at_once(plan):
    device = Device()
    with watched(device):
        passed(Candidate(name="turns", partials=plan.partials, gradients=plan.gradients), 0.8, entropy_grad=True)
    assert device.races() == []
    readers = {stream for name, stream, *_ in device.calls if name in ("reduction", "gradient")}
    assert readers == {1 if plan.buffers > 1 else 0}
    assert {stream for name, stream, *_ in device.calls if name.startswith("product")} == {0}


@pytest.mark.parametrize("plan", PLANS[:3], ids=lambda plan: f"{plan.buffers} buffers, {plan.wide_elements}")
def test_a_reduction_is_beside_the_next_product(plan):
    """The first stream's clock does not carry the reduction of the tile before."""
    device = Device()
    with watched(device):
        passed(Candidate(name="turns", partials=plan.partials), 0.8, entropy_grad=True)
    forward = device.calls[: [name for name, *_ in device.calls].index("reduction") + 2]
    (_, _, reduced, *_), (name, stream, clock, *_) = forward[-2:]
    assert (name, stream) == ("product", 0)
    assert clock[1] < reduced[1]


def test_a_buffer_that_is_not_waited_for_is_found():
    device = Device()
    plan = PLANS[0]
    with watched(device, forgetful=True):
        passed(Candidate(name="turns", partials=plan.partials), 0.8, entropy_grad=False)
    assert ("reduction", "product") in device.races()
