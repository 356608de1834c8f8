"""What a process of a large cluster pays for the plan of its pushes.

    python -m benchmarks.push_plan --json benchmarks/results/push_plan.json

Each figure is of a process of its own that does what a trainer rank or a sampler worker does before its first push, all
but the connection: the plan of its own part, names and shapes. Seconds are of its CPU, memory is the growth of its
largest resident set. The link is a relay's, the dearest for a rank, which also plans what it passes on.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.weight_push import LARGE, architecture_of, layout_of
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.push.ends import open_receiver, open_sender
from gtpo_megatron.weights.push.link import Meeting, Relay, SlotShape, WeightLink
from gtpo_megatron.weights.push.transports.shared_memory import create_slots, remove_name

MIB = 1 << 20
BUCKET_MIB = 256
LIMITS = {"cpu_s": 2.0, "growth_mib": 200.0}
DENSE = {"tensor_parallel_size": 8, "pipeline_parallel_size": 4}
EXPERTS = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "sequence_parallel": True}
CASES: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("Qwen2.5-72B", {"num_ranks": 64, **DENSE}, 8),
    ("Qwen2.5-72B", {"num_ranks": 1024, **DENSE}, 8),
    ("Qwen2.5-72B", {"num_ranks": 1024, **DENSE}, 4),
    ("Qwen3-235B-A22B", {"num_ranks": 128, **EXPERTS, "expert_parallel_size": 64}, 8),
    ("Qwen3-235B-A22B", {"num_ranks": 1024, **EXPERTS, "expert_parallel_size": 64}, 8),
    ("Qwen3-235B-A22B", {"num_ranks": 1024, **EXPERTS, "expert_parallel_size": 16}, 8),
)
"""Model, the trainer's ranks, workers of an engine; engines are on all the ranks' GPUs."""


def resident_bytes(key: str) -> int:
    """``VmRSS``, the resident set of this process, or ``VmHWM``, its largest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def measure(case: int, side: str, number: int) -> dict[str, Any]:
    """Run in a process of its own."""
    model, sizes, workers = CASES[case]
    parallel = ParallelConfig(**sizes)
    arch = architecture_of(LARGE[model][0])
    layout = layout_of(
        arch,
        parallel,
        workers=workers,
        engines=parallel.num_ranks // workers,
        bucket_mib=BUCKET_MIB,
        sender_policy="own_rank_first",
    )
    meeting = Meeting(
        host="localhost", port=1, num_ranks=parallel.num_ranks, num_workers=0, backend="gloo", deadline_s=1.0
    )
    slots = create_slots(SlotShape(slot_bytes=4096, num_ranks=1, deadline_s=1.0))
    endpoint = Relay(meeting=meeting, slots={number: slots})
    link = WeightLink(arch=arch, layout=layout, dtype_name="bfloat16", endpoint=endpoint)
    before, start = resident_bytes("VmRSS"), time.process_time()
    if side == "rank":
        end: Any = open_sender(link, number)
        slices = sum(len(bucket.slices) for stream in end._streams for bucket in stream.buckets.values())
    else:
        end = open_receiver(link, number, arch, torch.device("cpu"))
        slices = sum(len(bucket.slices) for bucket in end._stream.buckets)
    seconds = time.process_time() - start
    growth = resident_bytes("VmHWM") - before
    remove_name(slots)
    return {"side": side, "number": number, "cpu_s": seconds, "growth_mib": growth / MIB, "slices": slices}


def in_a_process_of_its_own(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.push_plan", "--process", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--process", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        case, side, number = arguments.process
        print(json.dumps(measure(int(case), side, int(number))))
        return
    rows = []
    for case, (model, sizes, workers) in enumerate(CASES):
        name = f"{model}, {sizes['num_ranks']} GPUs, engines of {workers}"
        last = sizes["num_ranks"] - 1
        found = [
            in_a_process_of_its_own(str(case), side, str(number))
            for side in ("rank", "worker")
            for number in (0, last // 2, last)
        ]
        row = {"model": model, "layout": sizes, "workers": workers, "processes": found}
        for key, limit in LIMITS.items():
            row[key] = max(one[key] for one in found)
            row[f"{key}_is_within"] = row[key] <= limit
        rows.append(row)
        print(f"{name}, {sizes}: at most {row['cpu_s']:.2f} s of CPU and {row['growth_mib']:.0f} MiB a process")
        for one in found:
            figures = f"{one['cpu_s']:.2f} s, {one['growth_mib']:.0f} MiB, {one['slices']:,} slices"
            print(f"    {one['side']} {one['number']}: {figures}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"limits": LIMITS, "bucket_mib": BUCKET_MIB, "cases": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
