"""Pushes between real processes: right values again and again, and who is named when somebody is missing."""

import os
import re
import signal

import pytest
import torch

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.param_mapping import as_matrix
from gtpo_megatron.weights.push.layout import SourceRank
from gtpo_megatron.weights.push.plan import PushPlan, relay_partners
from gtpo_megatron.weights.push.receiver import WeightReceiver
from gtpo_megatron.weights.push.sender import WeightSender
from gtpo_megatron.weights.push.transports.process_group import (
    Meeting,
    ProcessGroupReceiver,
    ProcessGroupSender,
    join,
    open_store,
)
from gtpo_megatron.weights.push.transports.relay import RelayReceiver, RelaySender
from gtpo_megatron.weights.push.transports.shared_memory import (
    SharedMemoryReceiver,
    SharedMemorySender,
    SlotShape,
    create_slots,
    remove_name,
)
from gtpo_megatron.weights.push.wire import tensor_dtype
from gtpo_megatron.weights.reshard import hf_shapes, load_plan
from tests.dist_utils import run_processes
from tests.unit.weights.push.test_plan import push_layout
from tests.unit.weights.test_reshard import architecture, filled, numbered_tensors, world

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

TRANSPORTS = ("shared_memory", "process_group", "relay")
NUM_PUSHES = 3


class Ends:
    """Makes either end of a transport, once the endpoints exist; other processes are handed it."""

    def __init__(self, transport, arch, layout, deadline_s):
        self.transport, self.arch, self.layout = transport, arch, layout
        self.plan = PushPlan(arch, layout)
        self.streams = [self.plan.stream(target.worker) for target in layout.targets]
        if transport in ("shared_memory", "relay"):
            writers = len(layout.sources) if transport == "shared_memory" else 1
            shape = SlotShape(slot_bytes=layout.bucket_bytes, num_ranks=writers, deadline_s=deadline_s)
            self.slots = {stream.target.worker: create_slots(shape) for stream in self.streams}
        if transport in ("process_group", "relay"):
            self.store = open_store("127.0.0.1", deadline_s=60)
            self.meeting = Meeting(
                host="127.0.0.1",
                port=self.store.port,
                num_ranks=len(layout.sources),
                num_workers=len(layout.targets) if transport == "process_group" else 0,
                backend="gloo",
                deadline_s=deadline_s,
            )

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "store"}  # which listens in this process

    def sending(self, rank):
        match self.transport:
            case "shared_memory":
                return SharedMemorySender(rank, self.slots)
            case "process_group":
                workers = {stream.worker for stream in self.plan.rank_streams(rank)}
                return ProcessGroupSender(rank, self.meeting, {self.meeting.member_for(one) for one in workers})
        partners = relay_partners(rank, self.plan.rank_streams(rank, passes_on=True))
        return RelaySender(rank, self.meeting, self.slots, partners)

    def sender(self, rank, dtype):
        columns = {name: as_matrix(tensor).shape[1] for name, tensor in numbered_tensors(self.arch).items()}
        streams = self.plan.rank_streams(rank, passes_on=self.transport == "relay")
        return WeightSender(rank, streams, self.sending(rank), dtype=dtype, columns=columns)

    def receiving(self, worker):
        match self.transport:
            case "shared_memory":
                return SharedMemoryReceiver(worker, self.slots[worker])
            case "process_group":
                spans = [bucket.spans for bucket in self.streams[worker].buckets]
                return ProcessGroupReceiver(worker, self.meeting, spans)
        return RelayReceiver(worker, self.slots[worker])

    def close(self):
        for slots in getattr(self, "slots", {}).values():
            remove_name(slots)


@pytest.fixture
def make_ends():
    made = []

    def make(transport, arch, layout, deadline_s=30.0):
        made.append(Ends(transport, arch, layout, deadline_s))
        return made[-1]

    yield make
    for ends in made:
        ends.close()


def push_and_check(index, _, __, ends):
    """Ranks come first, then workers; every push multiplies all weights by its number."""
    tensors = {name: t.float() for name, t in numbered_tensors(ends.arch).items()}
    num_ranks = len(ends.layout.sources)
    if index < num_ranks:
        plan = load_plan(ends.arch, ends.layout.sources[index].coordinates, ends.layout.padded_vocab_size)
        sender = ends.sender(index, torch.bfloat16)
        sums = []
        for number in range(1, NUM_PUSHES + 1):
            shards = filled(plan, {name: (number * tensor).double() for name, tensor in tensors.items()})
            sums.append(sender.push(shards, with_checksums=True))
        return sums
    stream = ends.streams[index - num_ranks]
    receiver = WeightReceiver(
        stream,
        ends.receiving(index - num_ranks),
        shapes=hf_shapes(ends.arch),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    sums = []
    for number in range(1, NUM_PUSHES + 1):
        names = []
        for name, tensor in receiver.tensors(with_checksums=True):
            names.append(name)
            assert tensor.dtype == tensor_dtype(name, torch.bfloat16)
            for box in [kept.slices for kept in stream.kept[name]]:
                assert torch.equal(as_matrix(tensor)[box], (number * as_matrix(tensors[name])[box]).to(tensor.dtype))
        assert sorted(names) == sorted(stream.kept)
        sums.append(dict(receiver.checksums))
    receiver.close()
    return sums


@pytest.mark.parametrize(
    "transport", [TRANSPORTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in TRANSPORTS[1:])]
)
@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_pushes_arrive_whole(transport, workers, make_ends):
    arch = architecture(vocab_size=70, tied_embeddings=False)
    layout = push_layout(arch, tp=2, replicas=1, workers=workers, bucket_bytes=512, itemsize=2)
    assert_whole(make_ends(transport, arch, layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    "transport", ["shared_memory", *(pytest.param(name, marks=pytest.mark.slow) for name in TRANSPORTS[1:])]
)
def test_experts_arrive_whole_in_the_smallest_slices(transport, make_ends):
    """Of two pipeline stages, each with the experts on two ranks; a bucket holds two rows, so a matrix takes many."""
    arch = architecture(family="glm4_moe", vocab_size=64)
    sources = tuple(
        SourceRank(rank=rank, coordinates=place)
        for rank, place in enumerate(world(expert=2, replicas=2, pipeline=(2, 1)))
    )
    layout = push_layout(arch, bucket_bytes=64, itemsize=2, sources=sources)
    assert_whole(make_ends(transport, arch, layout))


def assert_whole(ends):
    """Every push brings every worker its elements, and checksums that are those of what was sent."""
    assert len(ends.streams[0].buckets) > 6  # slots are used again within one push
    num_ranks, num_workers = len(ends.layout.sources), len(ends.streams)
    answers = run_processes(push_and_check, num_ranks + num_workers, ends, timeout_s=50)
    for push in range(NUM_PUSHES):
        for worker in range(num_workers):
            received, sent = answers[num_ranks + worker][push], {}
            for rank in range(num_ranks):
                for name, part in answers[rank][push].get(worker, {}).items():
                    sent[name] = (sent.get(name, 0) + part) % 2**64
            assert received == sent
            assert len(received) == len(ends.streams[worker].kept)


def without_rank_1(index, _, __, ends):
    """Rank 1 comes and sends nothing; the others say what they miss."""
    if index == 1:
        if ends.transport in ("process_group", "relay"):
            ends.absent = ends.sending(1)  # kept until all leave: the group would be closed with it
            ends.absent.start()
        return "absent"
    try:
        push_and_check(index, _, __, ends)
    except WeightSyncError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_does_not_send_is_named_by_the_deadline(transport, make_ends):
    arch = architecture()
    layout = push_layout(arch, tp=2, workers=1, bucket_bytes=256, itemsize=2, padded_vocab_size=14)
    ends = make_ends(transport, arch, layout, deadline_s=6.0)
    answers = run_processes(without_rank_1, 3, ends, timeout_s=60)
    assert f"transport {transport}" in answers[2]
    told = (
        answers[0] if transport == "relay" else answers[2]
    )  # the worker sees its own rank only, which says who it missed
    assert re.search(r"worker 0:? (bucket \d+ )?did not come from rank 1 within 6 s.*must not be used", told), answers


def rank_1_joins_only(index, _, __, ends):
    """Rank 1 is in the group and opens no connection."""
    if index == 1:
        ends.absent = join(ends.meeting, 1)
        return "absent"
    try:
        push_and_check(index, _, __, ends)
    except WeightSyncError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["process_group", "relay"])
def test_who_does_not_open_a_connection_is_named_by_the_deadline(transport, make_ends):
    arch = architecture()
    layout = push_layout(arch, tp=2, workers=1, bucket_bytes=256, itemsize=2, padded_vocab_size=14)
    ends = make_ends(transport, arch, layout, deadline_s=4.0)
    told = run_processes(rank_1_joins_only, 3, ends, timeout_s=60)[0 if transport == "relay" else 2]
    who, num = ("rank 0", 1) if transport == "relay" else ("worker 0", 2)
    expected = rf"transport {transport} \(gloo\), {who}: no connection with rank 1 within 4 s, \d of {num} are open"
    assert re.search(expected, told), told


class KilledInMidPush:
    """An end whose process is killed when it has given away some buckets."""

    def __init__(self, end, num_buckets):
        self._end, self._left = end, num_buckets

    def __getattr__(self, name):
        return getattr(self._end, name)

    def commit(self, worker, sequence, spans):
        self._end.commit(worker, sequence, spans)
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def rank_1_dies(index, _, __, ends, answers):
    if index == 1:
        sending = ends.sending
        ends.sending = lambda rank: KilledInMidPush(sending(rank), 4)
    try:
        push_and_check(index, _, __, ends)
    except WeightSyncError as error:
        (answers / str(index)).write_text(str(error), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_killed_in_mid_push_is_named(transport, make_ends, tmp_path):
    arch = architecture()
    layout = push_layout(arch, tp=2, workers=1, bucket_bytes=256, itemsize=2, padded_vocab_size=14)
    ends = make_ends(transport, arch, layout, deadline_s=4.0)
    with pytest.raises(AssertionError, match=r"rank 1 left no result \(exit code -9; hung ranks: \[\]\)"):
        run_processes(rank_1_dies, 3, ends, tmp_path, timeout_s=40)
    told = {int(path.name): path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    who = told[0] if transport == "relay" else told[2]  # a relayed worker sees its own rank only
    assert re.search(r"(bucket \d+|worker 0) .*did not come from rank 1\b.*must not be used", who), told


def test_a_worker_that_does_not_read_is_named(make_ends):
    """Over a network a rank cannot tell a slow worker from a slow line before the line's own time is over."""
    arch = architecture()
    ends = make_ends("shared_memory", arch, push_layout(arch, bucket_bytes=256), deadline_s=0.2)
    tensors = numbered_tensors(arch)
    sender = ends.sender(0, torch.float32)
    with pytest.raises(WeightSyncError, match="transport shared_memory, rank 0: worker 0 .* within 0.2 s"):
        sender.push(filled(load_plan(arch, ends.layout.sources[0].coordinates, 13), tensors), with_checksums=False)


def test_no_room_in_shared_memory_says_so():
    with pytest.raises(WeightSyncError, match=r"no room for .* MiB of buckets.*--shm-size.*bucket_mib"):
        create_slots(SlotShape(slot_bytes=1 << 50, num_ranks=1, deadline_s=1.0))
