"""Runs credit for ``benchmarks.credit``, from whatever checkout is on the module path.

It stands alone and takes nothing but ``assign_credit``, so that the package of an earlier commit can be measured by it.
Each line that it reads names a configuration; it answers with the CPU seconds of one call, in time of the process, so
that neighbours on the machine do not count. ``memory NAME`` answers with the peak of the resident set over what the
inputs take, in bytes (Linux).
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.config.algorithm import DAPOConfig, GRPOSConfig, GTPOConfig

CONFIGS = {
    "gtpo": GTPOConfig(),
    "gtpo_matrix": GTPOConfig(entropy_axis="matrix"),
    "gtpo_per_set": GTPOConfig(advantage_pool="per_set"),
    "gtpo_small_floor": GTPOConfig(entropy_floor=1e-14),
    "gtpo_geometric": GTPOConfig(entropy_mean="geometric"),
    "grpo_s": GRPOSConfig(),
    "dapo": DAPOConfig(),
}


def make_batch(groups: int, group_size: int, max_tokens: int) -> dict[str, Tensor]:
    """A seeded batch, groups one after the other; lengths are uniform in [1, max_tokens]."""
    torch.manual_seed(0)
    num_responses = groups * group_size
    lengths = torch.randint(1, max_tokens + 1, (num_responses,))
    mask = torch.arange(max_tokens) < lengths[:, None]
    return {
        "rewards": (torch.rand(num_responses) < 0.5).float(),
        "token_entropy": torch.rand(num_responses, max_tokens).mul_(2).mul_(mask),
        "response_mask": mask,
        "group_ids": torch.arange(groups).repeat_interleave(group_size),
    }


def memory_kib(field: str) -> int:
    """A field of this process's status, such as VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(command: str, batch: dict[str, Tensor]) -> float:
    """The answer to one line."""
    if command == "tokens":
        return float(batch["response_mask"].sum())
    if command == "cumsum":
        start = time.process_time()
        torch.cumsum(batch["token_entropy"], 1)
        return time.process_time() - start
    if command.startswith("memory "):
        config = CONFIGS[command.removeprefix("memory ")]
        assign_credit(config, **make_batch(2, 4, 8))  # what is loaded once is no memory of a batch
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts again from here
        before = memory_kib("VmRSS")
        credit = assign_credit(config, **batch)
        assert credit.advantages.shape == batch["token_entropy"].shape
        return 1024.0 * (memory_kib("VmHWM") - before)
    start = time.process_time()
    assign_credit(CONFIGS[command], **batch)
    return time.process_time() - start


def main() -> None:
    """Answers until the input ends."""
    torch.set_num_threads(1)
    batch = make_batch(*map(int, sys.argv[1:]))
    for line in sys.stdin:
        print(measure(line.strip(), batch), flush=True)


if __name__ == "__main__":
    main()
