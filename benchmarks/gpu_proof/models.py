"""Random models in Hugging Face's format, a rank of the trainer that has one, and a batch for it."""

import contextlib
import dataclasses
import gc
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu_proof.sizes import ModelSize, Sizes
from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.companions.preflight.probes.batches import random_rollouts
from gtpo_megatron.config.optimizer import OptimizerConfig, UpdateConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.reshard import hf_shapes
from recipes import tiny_cpu

GROUP_SIZE = 4


FILE_BYTES = 4 << 30
"""Of a file of weights, at least: the host holds one at a time."""


def make_folder(folder: Path, size: ModelSize, *, device: torch.device) -> None:
    """Writes a model of random bfloat16 weights, as large as initial ones are; norms are 1."""
    (folder / "config.json").write_text(json.dumps(size.config | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, Tensor] = {}
    files: dict[str, str] = {}

    def save() -> None:
        file = f"model-{len(set(files.values())):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, file))
        tensors.clear()

    for name, shape in hf_shapes(read_architecture(folder)).items():
        if "norm" in name:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            wide = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            tensors[name] = wide.mul_(0.02).bfloat16().cpu()
        if sum(tensor.nbytes for tensor in tensors.values()) >= FILE_BYTES:
            save()
    save()
    index = {"metadata": {}, "weight_map": files}  # transformers reads both
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def run_config(folder: Path, size: ModelSize, dtype: str) -> RunConfig:
    """GTPO on one rank, a step of one update."""
    base = tiny_cpu.gtpo()
    sampling = SamplingConfig(max_response_tokens=size.response_tokens)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(
            base.model,
            path=str(folder),
            dtype=dtype,
            max_sequence_tokens=size.prompt_tokens + size.response_tokens,
            head_chunk_tokens=4096,
            recompute=size.recompute,
        ),
        adapter=size.adapter,
        data=dataclasses.replace(
            base.data, prompts_per_step=size.responses // GROUP_SIZE, max_prompt_tokens=size.prompt_tokens
        ),
        evaluation=dataclasses.replace(base.evaluation, sampling=sampling),
        rollout=RolloutConfig(group_size=GROUP_SIZE, sampling=sampling),
        optimizer=OptimizerConfig(learning_rate=1e-6, schedule="constant", warmup_updates=0),
        parallel=ParallelConfig(num_ranks=1, distributed_optimizer=True),
        update=UpdateConfig(micro_batch_tokens=size.micro_batch_tokens),
    )


def rollouts_of(size: ModelSize, *, policy_version: int = 0) -> RolloutBatch:
    """Random tokens, all sequences equally long."""
    return random_rollouts(
        size.responses,
        prompt_tokens=size.prompt_tokens,
        response_tokens=size.response_tokens,
        vocab_size=size.config["vocab_size"],
        group_size=GROUP_SIZE,
        seed=1,
        policy_version=policy_version,
    )


@contextlib.contextmanager
def trainer(size: ModelSize, sizes: Sizes, *, replays: bool = False) -> Iterator[tuple[Any, Path]]:
    """A rank of the trainer with such a model, and the model's folder; Megatron is imported here.

    ``replays``: experts are chosen as the responses say.
    """
    from gtpo_megatron.actor.actor import MegatronActor

    gc.collect()  # the last one, whose objects refer to each other: its memory would be counted as this one's
    if sizes.device.type == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        make_folder(folder, size, device=sizes.device)
        config = run_config(folder, size, sizes.dtype)
        if replays:
            config = dataclasses.replace(
                config,
                rollout=dataclasses.replace(config.rollout, returns_routing=True),
                update=dataclasses.replace(config.update, routing_replay="rollout"),
            )
        actor = MegatronActor(config, global_rank=0, init_method=f"file://{scratch}/store")
        try:
            yield actor, folder
        finally:
            actor.close()
            for module in (module for chunk in actor._chunks for module in chunk.modules()):
                # it keeps its last tokens with their graph, which leads back to the model where Python does not look
                vars(module).pop("token_dispatcher", None)


def kernels_of_layers() -> str:
    """Whose layers the trainer builds here, in the planner's words: ``te`` or ``torch``."""
    from gtpo_megatron.actor import cpu_platform

    return "te" if cpu_platform.has_transformer_engine() else "torch"
