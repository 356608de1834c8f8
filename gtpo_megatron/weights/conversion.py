"""Converts between folders in Hugging Face format and folders that hold the model as a Megatron checkpoint.

A converted folder has everything of the Hugging Face folder but its weights, and these as a Megatron checkpoint in
``megatron/``; ``model.path`` may name either kind. Both directions stream: memory is bounded by one shard file.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.architecture import VOCAB_MULTIPLE, Architecture
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.hf.reader import WeightFolder, require_finite
from gtpo_megatron.weights.hf.stacked_experts import stacked, stacks
from gtpo_megatron.weights.hf.writer import SHARD_BYTES, copy_companions, write_shards, written_aside
from gtpo_megatron.weights.megatron.adapters import MergedModel, stored_adapters
from gtpo_megatron.weights.megatron.checkpoint_files import (
    MEGATRON_FOLDER,
    Verify,
    check_checkpoint,
    converted_weights,
)
from gtpo_megatron.weights.megatron.layout import CheckpointChunk, chunks_by_rank, cut, key_dtypes, model_parts
from gtpo_megatron.weights.megatron.reader import MegatronCheckpoint
from gtpo_megatron.weights.megatron.writer import write_checkpoint
from gtpo_megatron.weights.param_mapping import SliceCopy
from gtpo_megatron.weights.peft import write_peft_folder
from gtpo_megatron.weights.reshard import hf_shapes, stays_float32

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")
"""One of these at least makes a tokenizer; ``tokenizer_config.json`` alone does not."""


class ConversionProgress:
    """Receives the progress of a conversion and discards it; subclasses may show it."""

    def start(self, num_bytes: int) -> None:
        """Called after the checks.

        Args:
            num_bytes: number of bytes of tensors to convert.
        """

    def advance(self, num_bytes: int) -> None:
        """Called after each chunk.

        Args:
            num_bytes: number of bytes of tensors converted since the last call.
        """


def hf_to_megatron(source: Path, target: Path, parallel: ParallelConfig, *, progress: ConversionProgress) -> None:
    """Converts a Hugging Face folder.

    The layout decides how the checkpoint is cut into files, one file per rank, and the padding of the vocabulary; any
    layout can load the result.

    Args:
        source: Hugging Face format, safetensors.
        target: folder to create; it appears only if the conversion succeeds.
        parallel: layout of the ranks that will load it; data and context parallel sizes do not matter.
        progress: receives the bytes of every chunk.

    Raises:
        ConfigError: ``source`` is unusable or holds NaN or infinity, the layout does not divide the model, or
            ``target`` is not empty.
        WeightMappingError: the tensors are not exactly those of the architecture.
        CheckpointError: the disk is full or not writable.
    """
    arch = read_architecture(source)
    arch.check_layout(parallel)
    with WeightFolder(source) as weights:
        weights.check(hf_shapes(arch))
        parts = model_parts(arch, arch.padded_vocab_size(parallel.tensor_parallel_size, VOCAB_MULTIPLE))
        dtypes = key_dtypes(parts, {name: stored.dtype for name, stored in weights.tensors.items()})
        ranks = [
            [chunk for part, box in held for chunk in cut(part, box, dtypes[part.key].itemsize)]
            for held in chunks_by_rank(arch, parts, parallel)
        ]
        num_bytes = sum(
            chunk.box.num_rows * chunk.box.num_columns * dtypes[chunk.part.key].itemsize
            for chunks in ranks
            for chunk in chunks
        )

        def read(chunk: CheckpointChunk) -> Tensor:
            tensor = _chunk_tensor(weights, chunk, dtypes[chunk.part.key])
            progress.advance(tensor.nbytes)
            return tensor

        with written_aside(target, num_bytes=num_bytes) as scratch:
            progress.start(num_bytes)
            copy_companions(source, scratch, dtype_name=None)
            warn_without_tokenizer(source)
            write_checkpoint(scratch / MEGATRON_FOLDER, ranks, dtypes, read)


def _chunk_tensor(weights: WeightFolder, chunk: CheckpointChunk, dtype: torch.dtype) -> Tensor:
    def read(copy: SliceCopy) -> Tensor:
        piece = weights.read(copy.hf_name, copy.hf_box)
        require_finite([piece], copy.hf_name, where=weights.tensors[copy.hf_name].path)
        return piece

    copies = chunk.part.copies(chunk.box)
    if len(copies) == 1 and copies[0].megatron_box.shape == chunk.box.shape:
        return read(copies[0])
    tensor = torch.zeros(chunk.box.shape, dtype=dtype)  # rows that only pad the vocabulary stay so
    for copy in copies:
        tensor[copy.megatron_box.slices] = read(copy)
    return tensor


def dequantize(source: Path, target: Path, *, progress: ConversionProgress, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a folder of quantized weights as one of bfloat16; tensors that are not quantized stay as they are.

    Args:
        source: Hugging Face format, safetensors.
        target: folder to create; it appears only if the conversion succeeds.
        progress: receives the bytes of every tensor.
        shard_bytes: size of the largest file.

    Raises:
        ConfigError: ``source`` is unusable or not quantized, or ``target`` is not empty.
        WeightMappingError: the tensors are not exactly those of the architecture.
        CheckpointError: the disk is full or not writable.
    """
    arch = read_architecture(source)
    if not arch.is_quantized:
        raise ConfigError(f"{source}: its weights are not quantized; there is nothing to do")
    shapes = hf_shapes(arch)
    with WeightFolder(source) as weights:
        weights.check(shapes)
        parts = _stored_parts(shapes, arch)
        sizes = {
            name: sum(torch.Size(shapes[part]).numel() * weights.tensors[part].dtype.itemsize for part in its_parts)
            for name, its_parts in parts.items()
        }

        def read(names: Sequence[str]) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for name in names:
                tensors = [weights.whole(part).reshape(shapes[part]) for part in parts[name]]
                found[name] = stacked(name, tensors).contiguous()
                progress.advance(found[name].nbytes)
            return found

        with written_aside(target, num_bytes=sum(sizes.values())) as scratch:
            progress.start(sum(sizes.values()))
            copy_companions(source, scratch, dtype_name="bfloat16")
            warn_without_tokenizer(source)
            write_shards(scratch, sizes, read, shard_bytes=shard_bytes)


def _stored_parts(shapes: Mapping[str, tuple[int, ...]], arch: Architecture) -> dict[str, list[str]]:
    """The tensors of a folder, and which of the tables' tensors each is made of."""
    return stacks(shapes) if arch.experts is not None and arch.experts.clamp else {name: [name] for name in shapes}


def megatron_to_hf(
    checkpoint: Path,
    model: Path,
    target: Path,
    *,
    progress: ConversionProgress,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
    verify: Verify = "full",
) -> None:
    """Converts a Megatron checkpoint, of a converted folder or of a training run; adapters are merged.

    Args:
        checkpoint: folder with ``.metadata``.
        model: folder with the model's ``config.json`` and tokenizer, of either kind; of adapters also its weights.
        target: folder to create; it appears only if the conversion succeeds.
        progress: receives the bytes of every piece.
        shard_bytes: size of the largest file.
        replace: take the place of what ``target`` holds, when the new folder is complete.
        verify: what is compared with the checkpoint's manifest before anything is written; a converted folder has none.

    Raises:
        ConfigError: ``model`` is unusable, or ``target`` is not empty and may not be replaced.
        WeightMappingError: the parameters are not exactly those of the architecture.
        CheckpointError: the checkpoint is damaged, its adapters are of other weights than ``model`` has, or the disk is
            full or not writable.
    """
    arch = read_architecture(model)
    check_checkpoint(checkpoint, verify)
    shapes = hf_shapes(arch)
    with ExitStack() as closing:
        stored: MegatronCheckpoint | MergedModel
        if (adapters := stored_adapters(checkpoint, arch)) is not None:
            if verify != "none":
                adapters.check_frozen(model)
            stored = MergedModel(_open_model(model, arch, closing), adapters)
        else:
            stored = MegatronCheckpoint(checkpoint, arch)
        parts = _stored_parts(shapes, arch)
        sizes = {
            name: sum(torch.Size(shapes[part]).numel() * stored.dtypes[part].itemsize for part in its_parts)
            for name, its_parts in parts.items()
        }
        scratch = closing.enter_context(written_aside(target, num_bytes=sum(sizes.values()), replace=replace))
        progress.start(sum(sizes.values()))
        dtypes = {dtype for name, dtype in stored.dtypes.items() if not stays_float32(name)}
        copy_companions(model, scratch, dtype_name=_name(dtypes.pop()) if len(dtypes) == 1 else None)
        warn_without_tokenizer(model)

        def read(names: Sequence[str]) -> dict[str, Tensor]:
            found = stored.read([part for name in names for part in parts[name]], shapes, progress.advance)
            return {name: stacked(name, [found[part] for part in parts[name]]) for name in names}

        write_shards(scratch, sizes, read, shard_bytes=shard_bytes)


def _open_model(folder: Path, arch: Architecture, closing: ExitStack) -> WeightFolder | MegatronCheckpoint:
    """A reader of a model folder's weights, of either kind, checked."""
    if (converted := converted_weights(folder)) is not None:
        return MegatronCheckpoint(converted, arch)
    weights = closing.enter_context(WeightFolder(folder))
    weights.check(hf_shapes(arch))
    return weights


def megatron_to_peft(
    checkpoint: Path, model: Path, target: Path, *, replace: bool = False, verify: Verify = "full"
) -> None:
    """Writes the adapters of a checkpoint as a folder in peft's format, float32.

    Args:
        checkpoint: checkpoint of a run that trained adapters.
        model: folder of the weights that they were trained over, which the folder names.
        target: folder to create; it appears only if the conversion succeeds.
        replace: take the place of what ``target`` holds, when the new folder is complete.
        verify: what is compared with the checkpoint's manifest before anything is written.

    Raises:
        ConfigError: ``target`` is not empty, or the checkpoint has no adapters.
        CheckpointError: the checkpoint is damaged, its adapters are of other weights than ``model`` has, or the disk is
            full or not writable.
    """
    check_checkpoint(checkpoint, verify)
    arch = read_architecture(model)
    adapters = stored_adapters(checkpoint, arch)
    if adapters is None:
        raise ConfigError(f"{checkpoint} has all of the model's weights and no adapters; use megatron-to-hf")
    if verify != "none":
        adapters.check_frozen(model)
    num_bytes = sum(4 * one.numel() for pair in adapters.pairs.values() for one in pair)
    with written_aside(target, num_bytes=num_bytes, replace=replace) as scratch:
        takes_turns = arch.experts is not None and arch.experts.stacks_in_turns
        write_peft_folder(scratch, adapters.pairs, base=str(model), scale=adapters.scale, takes_turns=takes_turns)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def warn_without_tokenizer(folder: Path) -> None:
    """Warns if a model folder has no tokenizer: it converts, but nothing can be sampled with it."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        logger.warning(
            "%s has no tokenizer (%s); the converted folder has none either, and training needs one: copy its files in",
            folder,
            ", ".join(TOKENIZER_FILES),
        )
