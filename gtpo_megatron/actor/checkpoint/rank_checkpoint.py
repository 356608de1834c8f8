"""A rank's part of a checkpoint: model, optimizer, schedule, counters and random states as a Megatron dist checkpoint.

Keys of the sharded state, the same for every layout (names are Megatron's, layers numbered in the whole model)::

    decoder.layers.*, embedding.*, output_layer.*      weights, stacked over layers; or, where adapters are trained,
    adapters.model.layers.*.{a,b}                      these alone
    optimizer.state.{exp_avg,exp_avg_sq}.<weight>      Adam's moments
    optimizer.state.{fp32_param,param}.<weight>        float32 masters: bfloat16 models, sharded optimizers
    random                                             one object per rank, at its place in the layout
    reference.<weight>                                 of a reference policy that has been reset

and the common state ``optimizer`` (groups, step), ``schedule``, ``counters``, ``reference`` (its files, last reset),
``teacher`` (its files), ``adapters`` (what multiplies them).
"""

import inspect
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from gtpo_megatron.actor.checkpoint.adapter_state import check_kind, restore_adapters, sharded_adapters
from gtpo_megatron.actor.checkpoint.megatron_load import drop_extra_states, is_extra_state, load, reason
from gtpo_megatron.actor.checkpoint.optimizer_state import ensure_moments, padding_between_buckets, restore_optimizer
from gtpo_megatron.actor.checkpoint.reference_state import (
    REFERENCE,
    REFERENCE_PREFIX,
    REFERENCE_WEIGHTS,
    TEACHER,
    check_teacher,
    restore_reference,
    sharded_reference,
)
from gtpo_megatron.actor.checkpoint.writer import ForkedWrite, results_queue
from gtpo_megatron.actor.model.adapters import Adapters
from gtpo_megatron.actor.optimizer_step import OptimizerStep
from gtpo_megatron.actor.reference import FrozenReference, ReferencePolicy
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.observability.memory import return_free_memory, return_scarce_memory
from gtpo_megatron.weights.megatron.adapters import ADAPTERS, SCALE
from gtpo_megatron.weights.megatron.checkpoint_files import first_trouble
from gtpo_megatron.weights.megatron.restricted_pickle import load_index, load_object

RANDOM_KEY = "random"


class RankCheckpoint:
    """Saves and restores what a rank trains.

    Args:
        chunks: parts of the model on this rank, in order.
        adapters: adapters that are trained, and saved; None: all weights are.
        optimizer_step: optimizer, schedule and counters of the updates.
        reference: the reference policy, or the frozen weights below adapters, if any.
        teacher_files: checksum by name of the teacher's files; None without a teacher.

    All methods but ``is_written`` and ``close`` are called on all ranks at once.
    """

    def __init__(
        self,
        *,
        chunks: Sequence[Any],
        adapters: Adapters | None,
        optimizer_step: OptimizerStep,
        reference: ReferencePolicy | FrozenReference | None,
        teacher_files: Mapping[str, str] | None,
    ) -> None:
        self._chunks = chunks
        self._adapters = adapters
        self._optimizer_step = optimizer_step
        self._reference = reference
        self._teacher_files = teacher_files
        self._write: ForkedWrite | None = None
        self._folder = Path()
        self._strategies: dict[frozenset[str], Any] = {}

    # ----------------------------------------------------------------------------------------------------------- saving
    def begin(self, folder: Path, *, in_background: bool) -> None:
        """Takes a snapshot, and starts to write it into an existing, empty folder; training may go on at once.

        Raises:
            CheckpointError: the disk is full or not writable, or Megatron would store another optimizer than this one;
                the folder is then unusable and must be dropped.

        Collectives: one gather of texts and Megatron's own over the world.
        """
        assert self._write is None, "finish comes first"
        if mixed_up := _of_all_ranks(padding_between_buckets(self._optimizer_step.optimizer)):
            raise CheckpointError(
                f"checkpoint {folder} would have wrong moments and master weights: {mixed_up}; Megatron stores a "
                f"sharded optimizer with a pipeline and tied embeddings only if no bucket is padded: use another "
                f"data-parallel size, pipeline_parallel_size=1 or distributed_optimizer=False"
            )
        results_queue()
        self._folder = folder
        ensure_moments(self._optimizer_step.optimizer)
        try:
            state = _without_copies(self._state(is_loading=False))
            parts = frozenset(state)
            # who writes what is decided once for the same parts: others would be left out
            is_new = parts not in self._strategies
            if is_new:
                self._strategies[parts] = _save_strategy()
            request = dist_checkpointing.save(
                state,
                str(folder),
                sharded_strategy=self._strategies[parts],
                # that shards cover every tensor once is a matter of the layout: once a process is enough
                validate_access_integrity=is_new,
                async_sharded_save=True,
                **_ASYNC_ARGUMENTS,
            )
            self._write = ForkedWrite(request, folder, in_background=in_background)
        except (OSError, RuntimeError, CheckpointException) as error:
            raise self._not_written(reason(error)) from error

    def is_written(self) -> bool:
        """This rank's files are on the disk, or failed to get there. Communication: none."""
        return self._write is None or self._write.is_done()

    def finish(self) -> dict[str, str]:
        """Waits for this rank's files, then writes the index over all ranks' files.

        Returns:
            Checksum by name of this rank's files.

        Raises:
            CheckpointError: a rank could not write its files; the same error on every rank. Where rank 0 fails over the
                index, the error is its own, and what peers raise is Megatron's or the backend's word for a lost peer.

        Collectives: one gather of texts and Megatron's own over the world.
        """
        assert self._write is not None, "begin comes first"
        write, self._write = self._write, None
        checksums, trouble = write.wait()
        troubles = _of_all_ranks(trouble)
        if troubles:
            raise self._not_written(troubles)
        try:
            write.finish()
        except (OSError, RuntimeError, CheckpointException) as error:
            raise self._not_written(reason(error)) from error
        return_scarce_memory()
        return checksums

    def close(self) -> None:
        """Ends a write that nobody has waited for: the checkpoint will not get its name. Communication: none."""
        if self._write is not None:
            self._write.abandon()
            self._write = None

    def _not_written(self, reason: str) -> CheckpointError:
        free_gib = shutil.disk_usage(self._folder).free / 2**30 if self._folder.exists() else 0.0
        return CheckpointError(
            f"checkpoint {self._folder} could not be written ({free_gib:.2f} GiB free): {reason}; earlier ones stay "
            f"valid"
        )

    # ---------------------------------------------------------------------------------------------------------- loading
    def load(self, folder: Path, *, checksums: Mapping[str, str]) -> None:
        """Restores what was saved, in this layout or in another.

        In the layout of the checkpoint every random state comes back, and the run goes on to the last bit; in another
        the random states stay as they were seeded.

        Args:
            folder: folder of the checkpoint.
            checksums: checksums by file name, checked before anything is read; each rank reads a part of the files.

        Raises:
            CheckpointError: missing, damaged, truncated, or of another model.

        Collectives: one gather of texts and Megatron's own over the world.
        """
        _check_files(folder, checksums)
        ensure_moments(self._optimizer_step.optimizer)
        wanted = self._state(is_loading=True)
        nothing = {number: drop_extra_states(part) for number, part in wanted["model"].items()}
        stored, random_states = _read_own(folder, wanted.pop(RANDOM_KEY).unique_key)
        check_kind(self._adapters, stored, folder)
        if isinstance(self._reference, ReferencePolicy) and any(name.startswith(REFERENCE_PREFIX) for name in stored):
            wanted[REFERENCE_WEIGHTS] = sharded_reference(self._chunks, self._reference, _metadata())
        state, left_over, absent = load(wanted, folder, strict=StrictHandling.RETURN_ALL)
        unread = {key for key in left_over if is_extra_state(key)} | {RANDOM_KEY}
        _refuse_mismatch(folder, absent=absent, left_over=left_over - unread)
        if self._adapters is not None:
            restore_adapters(self._adapters, state, folder)
        else:
            for number, chunk in enumerate(self._chunks):
                chunk.load_state_dict(state["model"][str(number)] | nothing[str(number)])
        restore_optimizer(self._optimizer_step.optimizer, state["optimizer"])
        self._optimizer_step.schedule.load_state_dict(state["schedule"])
        if self._reference is not None:
            restore_reference(self._reference, state, self._chunks, folder)
        if self._teacher_files is not None:
            check_teacher(self._teacher_files, state, folder)
        if random_states is not None:
            _restore_random_states(random_states)
        self._optimizer_step.load_state_dict(state["counters"])
        return_free_memory()

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        if self._adapters is not None:
            model_state = {ADAPTERS: sharded_adapters(self._adapters, _metadata())}
        else:  # layers are numbered in the whole model: it does not matter which chunk of which rank holds them
            chunks = enumerate(self._chunks)
            model_state = {str(number): chunk.sharded_state_dict(metadata=_metadata()) for number, chunk in chunks}
        optimizer_state = self._optimizer_step.optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=_metadata()
        )
        state = {
            "model": model_state,
            "optimizer": optimizer_state,
            "schedule": self._optimizer_step.schedule.state_dict(),
            RANDOM_KEY: _random_states(),
            "counters": self._optimizer_step.state_dict(),
        }
        if self._adapters is not None and not is_loading:
            state[ADAPTERS] = {SCALE: self._adapters.scale}
        if self._teacher_files is not None and not is_loading:
            state[TEACHER] = {"files": dict(self._teacher_files)}
        if self._reference is not None and not is_loading:
            state[REFERENCE] = {"files": self._reference.files, "reset_step": self._reference.reset_step}
            if isinstance(self._reference, ReferencePolicy) and self._reference.reset_step:
                state[REFERENCE_WEIGHTS] = sharded_reference(self._chunks, self._reference, _metadata())
        return state


_ASYNC_ARGUMENTS = (
    # from 0.17 on the default is a package of its own; Megatron's own way is the same in all versions
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)


def _save_strategy() -> Any:
    """Replicas share the writing: each copies to the host and writes a part of what all of them have.

    Collectives of the first save: one gather of what replicas have, without its data.
    """
    strategy = get_default_save_sharded_strategy()
    strategy.thread_count = 1  # one file per rank: a node's ranks write at once as it is
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if dist.get_world_size(replicas) == 1:
        return strategy
    return FullyParallelSaveStrategyWrapper(strategy, replicas, do_cache_distribution=True)


def _without_copies(state: dict[str, Any]) -> dict[str, Any]:
    """Gives every shard on the CPU a storage of just its own bytes.

    Megatron copies each tensor that is a part of a larger one (the halves of a gated MLP, weights in the buffer of a
    sharded optimizer) before it writes; the fork has taken the snapshot already, and training would wait for the copy.
    """
    apply_factories(state)
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor) and shard.data is not None:
            shard.data = _alone(shard.data)
    return state


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory whose storage covers only its own bytes."""
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    if not is_part or tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    # numpy's arrays know their own extent only
    own = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    return own.view(tensor.dtype).view(tensor.shape)


def _metadata() -> dict[str, Any]:
    return {
        # the only form of a sharded optimizer that loads into every layout
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _random_states() -> ShardedObject:
    """Every rank's own, at its place along (pipeline, tensor, context, data)."""
    states = {
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the global state is what libraries draw from
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    axes = ("pipeline_model_parallel", "tensor_model_parallel", "context_parallel", "data_parallel")
    extent = tuple(getattr(parallel_state, f"get_{axis}_world_size")() for axis in axes)
    place = tuple(getattr(parallel_state, f"get_{axis}_rank")() for axis in axes)
    return ShardedObject(RANDOM_KEY, states, extent, place)


def _restore_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _check_files(folder: Path, checksums: Mapping[str, str]) -> None:
    """Reads every file once over all ranks.

    Raises:
        CheckpointError: a file is missing or has other content; the same error on every rank.

    Collectives: one gather of texts.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mine = sorted(checksums)[rank::num_ranks]
    trouble = first_trouble(folder, {name: checksums[name] for name in mine})
    troubles = _of_all_ranks(trouble)
    if troubles:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {troubles}; go on from an earlier one by writing its name into "
            f"{folder.parent / 'latest'}"
        )


def _read_own(folder: Path, random_key: str) -> tuple[set[str], Any]:
    """The names of all that is stored, and this rank's random states; None if they are of another layout.

    Raises:
        CheckpointError: index or random states cannot be read; the same error on every rank.

    Collectives: one gather of texts.
    """
    trouble, stored, random_states = "", set[str](), None
    try:
        index = load_index(folder)
        stored = set(index.state_dict_metadata)
        if random_key in stored:
            random_states = load_object(folder, index, random_key)[0]
    except CheckpointError as error:
        trouble = str(error)
    if troubles := _of_all_ranks(trouble):
        raise CheckpointError(f"checkpoint {folder} cannot be loaded: {troubles}")
    return stored, random_states


def _refuse_mismatch(folder: Path, *, absent: set[str], left_over: set[str]) -> None:
    """Raises CheckpointError where model and checkpoint do not hold the same."""
    for what, keys in (("lacks", absent), ("has, and this run does not know,", left_over)):
        if keys:
            raise CheckpointError(
                f"checkpoint {folder} {what} {sorted(keys)[0]!r} ({len(keys)} in all): it is of another model or "
                f"optimizer; resume with the configuration it was made with"
            )


def _of_all_ranks(trouble: str) -> str:
    """Returns the errors of all ranks, each with its rank's number. Collectives: one gather of texts over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, trouble)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)
