"""Checks of inputs that raise the same error on every tensor-parallel rank, so that no peer waits in a collective.

Each rank checks its own inputs; then all exchange one small message with an error, or with the values that must be
equal on all ranks (number of tokens, rows of the vocabulary, a checksum of the targets).
"""

import json
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gtpo_megatron import errors
from gtpo_megatron.distributed.groups import gather_stacked
from gtpo_megatron.errors import ConfigError, DataError, GTPOError, ShapeError

Facts = dict[str, object]

MESSAGE_BYTES = 2048
"""Fixed size of the exchanged message, so that a single gather suffices."""

WEIGHT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""float16 overflows at 65,504 and its gradients underflow without a loss scale."""


def agree(local_check: Callable[[], Facts], tp_group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Runs ``local_check`` and raises its error on every rank if it fails on any.

    Args:
        local_check: raises a `GTPOError`, or returns facts that must be equal on all ranks (JSON values).
        tp_group: None is one rank.
        device: device of the message, which the backend of the group must support.

    Raises:
        GTPOError: the error of the lowest failing rank, as DataError if it was not a GTPOError.
        ShapeError: the facts differ.

    Collectives: one all-gather of 2 KiB over ``tp_group``; none for one rank.
    """
    if tp_group is None or num_shards(tp_group) == 1:
        local_check()
        return
    cause: Exception | None = None
    try:
        text = json.dumps({"facts": local_check()}).encode()
    except GTPOError as error:
        cause, text = error, _as_message(type(error).__name__, str(error))
    except Exception as error:  # noqa: BLE001 - peers wait in the gather, so all ranks must raise
        cause, text = error, _as_message(DataError.__name__, f"{type(error).__name__}: {error}")
    mine = torch.tensor(list(text.ljust(MESSAGE_BYTES)), dtype=torch.uint8, device=device)
    received = [json.loads(bytes(row)) for row in gather_stacked(mine, tp_group).tolist()]
    for tp_rank, other in enumerate(received):
        if "error" in other:
            name, reason = other["error"]
            raise getattr(errors, name)(f"tensor-parallel rank {tp_rank}: {reason}") from cause
    for fact in received[0]["facts"]:
        values = [other["facts"][fact] for other in received]
        if any(value != values[0] for value in values):
            raise ShapeError(
                f"{fact}: tensor-parallel ranks disagree, got {values}; every rank must pass the same tokens and "
                "options, and an equal number of vocabulary rows (pad the vocabulary to a multiple of tp)"
            )


def _as_message(name: str, reason: str) -> bytes:
    """An error as JSON, its text cut to fit ``MESSAGE_BYTES``; a character can take twelve bytes."""
    while len(text := json.dumps({"error": [name, reason]}).encode()) > MESSAGE_BYTES:
        reason = reason[: len(reason) * 3 // 4]
    return text


def num_shards(tp_group: dist.ProcessGroup | None) -> int:
    """Number of ranks that share the vocabulary; 1 for None."""
    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    if size < 1:
        raise ConfigError("tp_group: this rank is not in it; pass the group that holds this rank's vocabulary rows")
    return size


def check_logits(logits: Tensor) -> None:
    """Checks ``[P, V/tp]`` of a float dtype."""
    if logits.ndim != 2:
        raise ShapeError(f"logits: got shape {tuple(logits.shape)}, expected [P, V/tp]; flatten the batch first")
    if not logits.is_floating_point():
        raise ShapeError(f"logits: got {logits.dtype}, expected a float dtype")


def check_linear(hidden: Tensor, weight: Tensor, chunk_tokens: int) -> None:
    """Checks ``[P, H]`` and ``[V/tp, H]`` of one dtype: bfloat16, float32 or float64."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: expected [P, H] and [V/tp, H] with one H"
        )
    if weight.dtype not in WEIGHT_DTYPES or hidden.dtype != weight.dtype:
        allowed = ", ".join(str(dtype) for dtype in WEIGHT_DTYPES)
        raise ShapeError(f"hidden is {hidden.dtype}, weight is {weight.dtype}; expected one dtype of {allowed}")
    if hidden.device != weight.device:
        raise ShapeError(f"hidden is on {hidden.device}, weight on {weight.device}; move them to one device")
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens: got {chunk_tokens}, expected at least 1")


def check_vocab(local_rows: int, tp_size: int, vocab_size: int) -> None:
    """Checks that the rows of all ranks hold the vocabulary."""
    if not 1 <= vocab_size <= local_rows * tp_size:
        raise ShapeError(
            f"vocab_size: got {vocab_size}, but {tp_size} tensor-parallel rank(s) with {local_rows} rows each hold "
            f"{local_rows * tp_size}; pad the vocabulary to a multiple of tp and pass its true size"
        )


def check_targets(target_ids: Tensor, num_tokens: int, vocab_size: int, device: torch.device) -> list[int]:
    """Checks ``[P]`` integers in ``[0, vocab_size)``; returns smallest, largest and sum. One host synchronisation."""
    if target_ids.shape != (num_tokens,) or target_ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            f"target_ids: got {target_ids.dtype} of shape {tuple(target_ids.shape)}, expected int64 [{num_tokens}]"
        )
    if target_ids.device != device:
        raise ShapeError(f"target_ids are on {target_ids.device}, the logits on {device}; move them to one device")
    if num_tokens == 0:
        return []
    smallest, largest, total = torch.stack([*target_ids.aminmax(), target_ids.sum()]).tolist()
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise DataError(
            f"target_ids: got {wrong}, expected ids in [0, {vocab_size}); pass only positions whose response mask is "
            "set, and the tokenizer that belongs to the model"
        )
    return [smallest, largest, total]


def check_temperature(temperature: float | Tensor, num_tokens: int, device: torch.device) -> list[float]:
    """Checks a positive float, or ``[P]`` of them; returns smallest and largest."""
    if not isinstance(temperature, Tensor):
        if not (temperature > 0 and math.isfinite(temperature)):
            raise DataError(f"temperature: got {temperature}, expected a positive finite number")
        return [float(temperature)]
    if temperature.shape != (num_tokens,) or not temperature.is_floating_point() or temperature.device != device:
        raise ShapeError(
            f"temperature: got {temperature.dtype} of shape {tuple(temperature.shape)} on {temperature.device}, "
            f"expected a float, or a float tensor [{num_tokens}] on {device}"
        )
    if num_tokens == 0:
        return []
    smallest, largest = torch.stack(temperature.detach().aminmax()).tolist()
    if not (smallest > 0 and math.isfinite(largest)):
        raise DataError(f"temperature: got values from {smallest} to {largest}, expected positive finite numbers")
    return [smallest, largest]
