"""Gradients and optimizer state off the GPU while somebody else needs it, and back, bit for bit."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.actor.host_pieces import host_pieces, split_like

logger = logging.getLogger(__name__)


class HostCopies:
    """Copies of tensors on the host, page-locked if there is a GPU, so that they travel at full speed.

    A tensor stays the same object, with the same views on it: its storage is emptied and filled again. The host's
    memory is kept for the next time, in which the same tensors must come in the same order to find it.
    """

    def __init__(self) -> None:
        self._parked: list[tuple[Tensor, list[Tensor]]] = []
        self._buffers: list[list[Tensor]] = []

    def park(self, tensors: Iterable[Tensor], *, are_unchanged: bool = False) -> int:
        """Moves tensors to the host; returns how many bytes. Each must own its storage as a whole.

        Args:
            tensors: the tensors.
            are_unchanged: they are what they were at their last return: what the host has of them is not written anew.
        """
        num_bytes = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            is_new = len(self._parked) == len(self._buffers)
            pieces = self._pieces(len(self._parked), len(flat), pin=tensor.is_cuda)
            if is_new or not are_unchanged:
                for piece, part in zip(pieces, split_like(flat, pieces), strict=True):
                    piece.copy_(part, non_blocking=True)
            self._parked.append((tensor, pieces))
            num_bytes += len(flat)
        _synchronise(self._parked)
        for tensor, _ in self._parked:
            tensor.untyped_storage().resize_(0)
        return num_bytes

    def fetch(self) -> None:
        """Moves everything back."""
        for tensor, pieces in self._parked:
            tensor.untyped_storage().resize_(sum(len(piece) for piece in pieces))
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            for piece, part in zip(pieces, split_like(flat, pieces), strict=True):
                part.copy_(piece, non_blocking=True)
        _synchronise(self._parked)
        self._parked.clear()

    def _pieces(self, place: int, num_bytes: int, *, pin: bool) -> list[Tensor]:
        """By place, not by identity: ``parameter.data`` is another object every time."""
        if place == len(self._buffers):
            self._buffers.append([])
        if sum(len(piece) for piece in self._buffers[place]) != num_bytes:
            self._buffers[place] = host_pieces(num_bytes, pin=pin)
        return self._buffers[place]


def optimizer_tensors(optimizer: Any, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Everything that an optimizer keeps besides the model's own parameters, each storage once.

    Args:
        optimizer: Megatron's, plain, distributed or chained.
        parameters: parameters of the model, which sampling and scoring need.
    """
    seen = {parameter.data.untyped_storage().data_ptr() for parameter in parameters}
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:  # a rank without parameters
            continue
        kept = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        kept += [parameter.data for group in inner.param_groups for parameter in group["params"]]
        for tensor in kept:
            place = tensor.untyped_storage().data_ptr()
            if place not in seen:
                seen.add(place)
                found.append(tensor)
    return found


def _synchronise(moved: list[tuple[Tensor, list[Tensor]]]) -> None:
    if moved and moved[0][0].is_cuda:
        torch.cuda.synchronize()
