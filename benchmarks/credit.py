"""Time and memory of credit on one core, beside one pass of ``torch.cumsum`` over the padded entropies.

    python -m benchmarks.credit

Rounds run the yardstick and every configuration one after the other; a ratio is the median over rounds of the ratio
within a round, in CPU time of the process, so that neighbours on the machine do not count. Extra memory is the peak of
the resident set over what the inputs take, the two outputs included, in a process of its own (Linux), as a multiple of
the entropy tensor's size.
"""

import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.config.algorithm import AlgorithmConfig, DAPOConfig, GRPOSConfig, GTPOConfig

CONFIGS: dict[str, AlgorithmConfig] = {
    "gtpo": GTPOConfig(),
    "gtpo_matrix": GTPOConfig(entropy_axis="matrix"),
    "gtpo_per_set": GTPOConfig(advantage_pool="per_set"),
    "gtpo_small_floor": GTPOConfig(entropy_floor=1e-14),  # so wide a range that every position takes a grid of its own
    "gtpo_geometric": GTPOConfig(entropy_mean="geometric"),
    "grpo_s": GRPOSConfig(),
    "dapo": DAPOConfig(),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The batch and the number of rounds.

    Attributes:
        groups: prompt groups.
        group_size: responses a group.
        max_tokens: padded length; response lengths are uniform in [1, max_tokens].
        rounds: repetitions.
        json: file to write.
    """

    groups: int = 512
    group_size: int = 16
    max_tokens: int = 4096
    rounds: int = 5
    json: str = "benchmarks/results/credit.json"


def make_batch(options: Options) -> dict[str, Tensor]:
    """A seeded batch, groups one after the other."""
    torch.manual_seed(0)
    num_responses = options.groups * options.group_size
    lengths = torch.randint(1, options.max_tokens + 1, (num_responses,))
    mask = torch.arange(options.max_tokens) < lengths[:, None]
    return {
        "rewards": (torch.rand(num_responses) < 0.5).float(),
        "token_entropy": torch.rand(num_responses, options.max_tokens).mul_(2).mul_(mask),
        "response_mask": mask,
        "group_ids": torch.arange(options.groups).repeat_interleave(options.group_size),
    }


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def measure_times(options: Options) -> dict[str, Any]:
    """Seconds and ratios by configuration."""
    batch = make_batch(options)
    variants: dict[str, Callable[[], object]] = {"cumsum": lambda: torch.cumsum(batch["token_entropy"], 1)}
    for name, config in CONFIGS.items():
        variants[name] = lambda config=config: assign_credit(config, **batch)  # type: ignore[misc]
    for function in variants.values():
        function()
    rounds = [{name: cpu_seconds(function) for name, function in variants.items()} for _ in range(options.rounds)]
    return {
        name: {
            "seconds": statistics.median(r[name] for r in rounds),
            "ratio_to_cumsum": statistics.median(r[name] / r["cumsum"] for r in rounds),
        }
        for name in variants
    }


def _peak_over_inputs(options: Options, name: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    batch = make_batch(options)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts again from here
    before = memory_kib("VmRSS")
    credit = assign_credit(CONFIGS[name], **batch)
    peak = memory_kib("VmHWM")
    assert credit.advantages.shape == batch["token_entropy"].shape
    pipe.send((peak - before) * 1024 / batch["token_entropy"].nbytes)


def memory_kib(field: str) -> int:
    """A field of this process's status, such as VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure_memory(options: Options, name: str) -> float:
    """Peak extra memory over the entropy tensor's size; both outputs count."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_peak_over_inputs, args=(options, name, sender))
    process.start()
    ratio = float(receiver.recv())
    process.join()
    return ratio


def main() -> None:
    """Runs the benchmark and prints a table."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    times = measure_times(options)
    for name in CONFIGS:
        times[name]["extra_memory_ratio"] = measure_memory(options, name)
    result = {
        "options": asdict(options),
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "results": times,
    }
    for name, row in times.items():
        memory = f"{row['extra_memory_ratio']:6.2f} x entropies" if "extra_memory_ratio" in row else ""
        print(f"{name:16s} {row['seconds']:8.3f} s {row['ratio_to_cumsum']:7.2f} x cumsum {memory}")
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
