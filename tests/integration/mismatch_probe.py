"""Run as a program: a tiny run in one process, in which vLLM loads a push with two attention heads swapped.

    python -m tests.integration.mismatch_probe FOLDER VERSION DTYPE ENTROPY_SOURCE

The tensors of that policy version are changed after their checksum was taken. Prints the error that ends the run.
"""

import dataclasses
import os
import sys
from pathlib import Path

HEAD_SIZE = 32


def swapped(tensor):
    heads = tensor.unflatten(0, (-1, HEAD_SIZE)).clone()
    heads[[0, 1]] = heads[[1, 0]]
    return heads.flatten(0, 1)


def main(folder: Path, version: int, dtype: str, source: str) -> None:
    from rich.console import Console

    from gtpo_megatron.config.parallel import ParallelConfig
    from gtpo_megatron.config.rollout import LearntLimits
    from gtpo_megatron.errors import WeightSyncError
    from gtpo_megatron.train import train
    from gtpo_megatron.weights.push.receiver import WeightReceiver
    from recipes import tiny_cpu

    tensors = WeightReceiver.tensors

    def others(receiver, *, with_checksums):
        is_broken = receiver._num_pushes == version  # the first push is version 0
        for name, tensor in tensors(receiver, with_checksums=with_checksums):
            is_swapped = is_broken and name.endswith("layers.1.self_attn.q_proj.weight")
            yield name, swapped(tensor) if is_swapped else tensor

    WeightReceiver.tensors = others
    base = tiny_cpu.gtpo(num_steps=4)
    mismatch = base.weight_sync.mismatch if dtype == "float32" else LearntLimits()
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, dtype=dtype),
        data=dataclasses.replace(base.data, prompts_per_step=8),
        evaluation=dataclasses.replace(base.evaluation, num_problems=2, samples=1, every_steps=0),
        parallel=ParallelConfig(num_ranks=1),
        rollout=dataclasses.replace(base.rollout, group_size=4, dtype=dtype, entropy_source=source),
        weight_sync=dataclasses.replace(base.weight_sync, mismatch=mismatch),
        checkpoint=dataclasses.replace(base.checkpoint, every_steps=0, export_hf=False),
        cluster=dataclasses.replace(base.cluster, mode="local"),
    )
    try:
        train(config, run_dir=folder, resume=False, console=Console(file=sys.stderr))
        print("the run ended well", flush=True)
    except WeightSyncError as error:
        print(f"stopped: {error}", flush=True)
    os._exit(0)  # vLLM cannot leave a world that the trainer has left before


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
