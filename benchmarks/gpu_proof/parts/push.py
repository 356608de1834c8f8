"""A push between two processes on one GPU, through memory that both have open (CUDA IPC); without one through a file.

Both ends are a run's own: the sender of a trainer's rank and the receiver of an engine's worker, transport ``relay``.
"""

import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_proof.models import make_folder
from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import ModelSize, Sizes
from benchmarks.weight_push import layout_of, shard_of
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.push.ends import open_receiver, open_sender
from gtpo_megatron.weights.push.link import Meeting, Relay, SlotShape, WeightLink
from gtpo_megatron.weights.push.sync import compare_checksums, merge_checksums
from gtpo_megatron.weights.push.transports.process_group import open_store
from gtpo_megatron.weights.push.transports.shared_memory import create_slots, remove_name

DEADLINE_S = 60.0


def run(report: Report, sizes: Sizes) -> None:
    for size in sizes.models:
        with report.section(f"{size.name}: push between two processes") as section:
            _push(section, size, sizes)


def _push(section: Section, size: ModelSize, sizes: Sizes) -> None:
    is_gpu = sizes.device.type == "cuda"
    with tempfile.TemporaryDirectory() as scratch:
        make_folder(Path(scratch), size, device=sizes.device)
        arch = read_architecture(Path(scratch))
    layout = layout_of(arch, ParallelConfig(num_ranks=1), workers=1, bucket_mib=1, sender_policy="own_rank_first")
    layout = type(layout)(
        **{name: getattr(layout, name) for name in layout.__dataclass_fields__} | {"bucket_bytes": sizes.bucket_bytes}
    )
    store = open_store("127.0.0.1", deadline_s=DEADLINE_S)
    slots = create_slots(SlotShape(slot_bytes=layout.bucket_bytes, num_ranks=1, deadline_s=DEADLINE_S, on_gpu=is_gpu))
    meeting = Meeting(
        host="127.0.0.1",
        port=store.port,
        num_ranks=1,
        num_workers=0,
        backend="nccl" if is_gpu else "gloo",
        deadline_s=DEADLINE_S,
    )
    link = WeightLink(
        arch=arch, layout=layout, dtype_name="bfloat16", endpoint=Relay(meeting=meeting, slots={0: slots})
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_receive, args=(link, arch, str(sizes.device), theirs), daemon=True)
    worker.start()
    theirs.close()  # so that a worker that dies ends the wait for its answer
    try:
        _rounds(section, link, ours, sizes)
    finally:
        ours.close()
        worker.join(10)
        if worker.is_alive():
            worker.terminate()
        remove_name(slots)


def _rounds(section: Section, link: WeightLink, pipe: Connection, sizes: Sizes) -> None:
    with torch.device(sizes.device):
        parameters = shard_of(link.arch, link.layout.sources[0].coordinates, link.layout.padded_vocab_size)
    sender = open_sender(link, 0)
    _answer(pipe)
    seconds = []
    for number in range(1 + sizes.warm_rounds + sizes.rounds):
        verified = number == 0
        pipe.send(verified)
        began = time.perf_counter()
        sent = sender.push(parameters, with_checksums=verified)
        received, num_bytes = _answer(pipe)
        seconds.append(time.perf_counter() - began)
        if verified:
            compare_checksums(merge_checksums([sent]), {0: received}, version=0)
            section.figure("tensors whose checksums are equal on both sides", len(received))
            section.figure("checked push", seconds[-1], "s")
    timed = statistics.median(seconds[1 + sizes.warm_rounds :])
    section.figure("pushed", num_bytes / 1e9, "GB")
    section.figure("push", timed, "s")
    section.figure("rate of a push", num_bytes / 1e9 / timed, "GB/s")
    sender.close()


def _answer(pipe: Connection) -> Any:
    """The worker's, or what it died of."""
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError(f"the receiving process has said nothing for {DEADLINE_S:g} s")
    try:
        answer = pipe.recv()
    except EOFError as error:
        raise RuntimeError("the receiving process has died") from error
    if isinstance(answer, str):
        raise RuntimeError(f"the receiving process: {answer}")
    return answer


def _receive(link: WeightLink, arch: Architecture, device: str, pipe: Connection) -> None:
    """The worker: takes pushes until the pipe is closed."""
    try:
        if device == "cuda":
            torch.cuda.set_device(0)
        receiver = open_receiver(link, 0, arch, torch.device(device))
        pipe.send(())
        while True:
            with_checksums = pipe.recv()
            num_bytes = 0
            for _, tensor in receiver.tensors(with_checksums=with_checksums):
                num_bytes += tensor.nbytes
            if device == "cuda":
                torch.cuda.synchronize()
            pipe.send((dict(receiver.checksums), num_bytes))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - the other process reports it
        pipe.send(f"{type(error).__name__}: {error}")
