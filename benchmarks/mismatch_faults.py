"""Faults between trainer and sampler, planted in a real engine and a real trainer; see ``benchmarks/mismatch.py``.

A fault is in one of three places. *On the way*: between the trainer's checksum and the sampler's. *In the loader*:
tensors arrive whole, and vLLM gets others. *In the sampler*: its settings or its caches. Only the first can be seen by
checksums.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BIT_OF_EXPONENT, BIT_OF_MANTISSA = 27, 3
"""Bits of float32; of bfloat16 they are 16 lower, and the lowest mantissa bit stands for the second."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What faults are planted in.

    Attributes:
        worker: vLLM's only worker.
        receiver: of the push, in it.
        sender: of the push, in the trainer.
        engine: the ``VllmEngine``.
        head_size: of attention.
        stale: weights of the trainer, by name in Megatron, as they were some updates ago.
    """

    worker: Any
    receiver: Any
    sender: Any
    engine: Any
    head_size: int
    stale: dict[str, Tensor]

    @property
    def model(self) -> torch.nn.Module:
        """VLLM's."""
        model: torch.nn.Module = self.worker.model_runner.model
        return model


Plant = Callable[[World], AbstractContextManager[None]]


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an object while the block runs."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


# ----------------------------------------------------------------------------------------------------------- on the way
def _stale_where(is_stale: Callable[[str], bool]) -> Plant:
    """The sender's bytes of some parameters are old ones; its checksums are of the new."""

    def plant(world: World) -> AbstractContextManager[None]:
        pack = world.sender._pack

        def packed(piece: Any, parameters: Any, memory: Tensor, first: int) -> None:
            name = piece.copy.megatron_name
            pack(piece, world.stale if is_stale(name) else parameters, memory, first)

        return patched(world.sender, "_pack", packed)

    return plant


def _stale_bucket(world: World) -> AbstractContextManager[None]:
    """The bytes of one bucket in the middle are old ones, as in a slot that nobody wrote."""
    pack, (stream,) = world.sender._pack, world.sender._streams
    chosen = {id(piece) for piece in stream.buckets[len(stream.buckets) // 2].pieces}

    def packed(piece: Any, parameters: Any, memory: Tensor, first: int) -> None:
        pack(piece, world.stale if id(piece) in chosen else parameters, memory, first)

    return patched(world.sender, "_pack", packed)


def _flipped(bit: int) -> Plant:
    """One bit of one weight of a matrix in the middle flips in the slot."""

    def plant(world: World) -> AbstractContextManager[None]:
        unpack = world.receiver._unpack

        def unpacked(bucket: Any, memory: Tensor, unfinished: dict[str, Tensor], missing: dict[str, int]) -> None:
            unpack(bucket, memory, unfinished, missing)
            for name, tensor in unfinished.items():
                if name == "model.layers.1.mlp.down_proj.weight" and missing[name] == 0:
                    flat = tensor.view(-1)[: tensor.numel()]
                    place = int(flat.float().abs().argmax())
                    integers = flat.view(torch.int32 if flat.dtype == torch.float32 else torch.int16)
                    shift = bit if flat.dtype == torch.float32 else max(0, bit - 16)
                    integers[place] ^= 1 << shift

        return patched(world.receiver, "_unpack", unpacked)

    return plant


# -------------------------------------------------------------------------------------------------------- in the loader
Change = Callable[[str, Tensor, World], Tensor]


def _changed(change: Change) -> Plant:
    """Tensors are changed after their checksum was taken, before vLLM loads them."""

    def plant(world: World) -> AbstractContextManager[None]:
        tensors = world.receiver.tensors

        def others(*, with_checksums: bool) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors(with_checksums=with_checksums):
                yield name, change(name, tensor, world)

        return patched(world.receiver, "tensors", others)

    return plant


def _swap_heads(name: str, tensor: Tensor, world: World) -> Tensor:
    if not name.endswith("layers.1.self_attn.q_proj.weight"):
        return tensor
    heads = tensor.unflatten(0, (-1, world.head_size)).clone()
    heads[[0, 1]] = heads[[1, 0]]
    return heads.flatten(0, 1)


def _one_kv_head_twice(name: str, tensor: Tensor, world: World) -> Tensor:
    if ".layers.1.self_attn." not in name or not any(part in name for part in ("k_proj", "v_proj")):
        return tensor
    heads = tensor.unflatten(0, (-1, world.head_size)).clone()
    heads[1] = heads[0]
    return heads.flatten(0, 1)


def _permuted_shard(name: str, tensor: Tensor, world: World) -> Tensor:
    """Of the second of two tensor-parallel shards of an up projection, the rows come in another order."""
    del world
    if not name.endswith("layers.1.mlp.up_proj.weight"):
        return tensor
    half = len(tensor) // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(0))
    return torch.cat([tensor[:half], tensor[half:][order]])


def _without_qk_bias(name: str, tensor: Tensor, world: World) -> Tensor:
    del world
    is_dropped = name.endswith(("q_proj.bias", "k_proj.bias"))
    return torch.zeros_like(tensor) if is_dropped else tensor


# ------------------------------------------------------------------------------------------------------- in the sampler
def _stale_output(world: World) -> AbstractContextManager[None]:
    """The output layer keeps the weights of some updates ago, while everything else is new."""
    processor = world.model.logits_processor
    old = world.stale.get("output_layer.weight", world.stale["embedding.word_embeddings.weight"])

    def head(lm_head: Any, hidden: Tensor, bias: Tensor | None) -> Tensor:
        weight = lm_head.weight.data.clone()
        weight[: len(old)] = old.to(weight.dtype)
        dtype = processor.head_dtype or hidden.dtype
        return torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype), bias)

    return patched(processor, "_apply_head", head)


@contextmanager
def _other_rope(world: World) -> Iterator[None]:
    """The sampler's rotary base is ten times the trainer's."""
    (rotary,) = {id(m): m for m in world.model.modules() if hasattr(m, "cos_sin_cache")}.values()
    kept = rotary.cos_sin_cache.clone()
    rotary.base *= 10
    rotary.cos_sin_cache.copy_(rotary._compute_cos_sin_cache().to(kept.dtype))
    yield
    rotary.base /= 10
    rotary.cos_sin_cache.copy_(kept)


@contextmanager
def _other_norm_eps(world: World) -> Iterator[None]:
    """The sampler's normalisations have 1e-5, Llama's, in place of Qwen's 1e-6."""
    norms = [module for module in world.model.modules() if hasattr(module, "variance_epsilon")]
    kept = [norm.variance_epsilon for norm in norms]
    for norm in norms:
        norm.variance_epsilon = 1e-5
    yield
    for norm, eps in zip(norms, kept, strict=True):
        norm.variance_epsilon = eps


def _kept_prefixes(world: World) -> AbstractContextManager[None]:
    """Keys and values of the prompts stay in the cache over the push."""
    return patched(world.engine.weights, "forget_prefixes", lambda **_: None)


KEPT_PREFIXES = "prefix cache not reset"

ON_PUSH: dict[str, Plant] = {
    "one layer not pushed": _stale_where(lambda name: ".layers.1." in name),
    "one stale bucket": _stale_bucket,
    "two heads swapped": _changed(_swap_heads),
    "a KV head duplicated": _changed(_one_kv_head_twice),
    "one TP shard's rows permuted": _changed(_permuted_shard),
    "q and k bias dropped": _changed(_without_qk_bias),
    KEPT_PREFIXES: _kept_prefixes,
    "one exponent bit flipped": _flipped(BIT_OF_EXPONENT),
    "one mantissa bit flipped": _flipped(BIT_OF_MANTISSA),
}
"""Planted while weights are pushed."""

ON_SAMPLING: dict[str, Plant] = {
    "wrong rope theta": _other_rope,
    "wrong norm epsilon": _other_norm_eps,
    "tied output stale": _stale_output,
}
"""Planted while responses are sampled."""

TEMPERATURE = "temperature on one side only"
"""Planted in the request."""

STALE = frozenset({"one layer not pushed", "one stale bucket", "tied output stale", KEPT_PREFIXES})
"""Faults whose size is that of the updates that were missed."""
