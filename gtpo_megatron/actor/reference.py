"""The reference policy: frozen weights on the host, which change places with the live ones for a scoring pass.

Below adapters the frozen weights are there already, and the reference policy is the model without its adapters.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gtpo_megatron.actor.host_pieces import host_pieces, split_like
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.megatron.adapters import frozen_files
from gtpo_megatron.weights.megatron.checkpoint_files import file_checksum
from gtpo_megatron.weights.weight_checks import check_same_architecture

logger = logging.getLogger(__name__)


class ReferencePolicy:
    """The host's copy of a rank's weights, of the policy that the live one is compared with.

    The two policies exchange bytes: parameters keep their storage, and with it everything that looks into it
    (Megatron's buffers, the optimizer). So there is one copy on the host, page-locked if there is a GPU, and none on
    the GPU.

    Args:
        weights: gives this rank's live weights by name; they hold the reference's values now.
        reset_every_steps: see ``ReferenceConfig``.
        files: checksum by name of the files that the values came from.

    Attributes:
        files: likewise.
        reset_step: the step after which the current policy became the reference; 0: the files say what it is.
    """

    def __init__(
        self, weights: Callable[[], Mapping[str, Tensor]], *, reset_every_steps: int, files: Mapping[str, str]
    ) -> None:
        self._weights = weights
        self._reset_every_steps = reset_every_steps
        self.files = dict(files)
        self.reset_step = 0
        # by the piece, so that of both policies the GPU holds no more than a piece at once
        self._host = {name: host_pieces(tensor.nbytes, pin=tensor.is_cuda) for name, tensor in weights().items()}
        self._take_live()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model is the reference within; afterwards it is the live policy again, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def step_ends(self, step: int) -> None:
        """After the updates of a step: the current policy becomes the reference if it is time."""
        if self._reset_every_steps and step % self._reset_every_steps == 0:
            self._take_live()
            self.reset_step = step
            logger.info("the policy of step %d is the reference from now on", step)

    def values(self) -> dict[str, Tensor]:
        """The reference's weights in ordinary host memory; on a CPU they are its own memory, else a copy."""
        live = self._weights()
        return {name: _whole(pieces, like=live[name]) for name, pieces in self._host.items()}

    def restore(self, values: Mapping[str, Tensor], *, reset_step: int) -> None:
        """Takes over what ``values`` gave to a checkpoint.

        Args:
            values: values of every weight of this rank.
            reset_step: see the class.
        """
        for name, pieces in self._host.items():
            for piece, part in zip(pieces, split_like(_bytes(values[name]), pieces), strict=True):
                piece.copy_(part)
        self.reset_step = reset_step

    def _take_live(self) -> None:
        for live, host in self._pairs():
            host.copy_(live, non_blocking=True)
        _synchronise()

    def _exchange(self) -> None:
        for live, host in self._pairs():
            held = live.clone()
            live.copy_(host, non_blocking=True)
            host.copy_(held, non_blocking=True)
        _synchronise()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of live and host memory, as bytes."""
        for name, tensor in self._weights().items():
            pieces = self._host[name]
            yield from zip(split_like(_bytes(tensor), pieces), pieces, strict=True)


class FrozenReference:
    """The weights below adapters: the model with its adapters switched off. Costs no memory.

    Args:
        in_place: switches the adapters off within a block, see ``ReferencePolicy.in_place``.
        folder: folder of the model, whose weights are frozen.

    Attributes:
        files: checksum by name of the files that the frozen weights came from.
        reset_step: always 0: the files say what they are.

    Collectives: one gather of texts over the world.
    """

    def __init__(self, in_place: Callable[[], AbstractContextManager[None]], folder: Path) -> None:
        self.in_place = in_place
        self.files = folder_checksums(folder)
        self.reset_step = 0

    def step_ends(self, step: int) -> None:
        """After the updates of a step: the frozen weights stay as they are."""


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as a vector of bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def _whole(pieces: list[Tensor], *, like: Tensor) -> Tensor:
    if like.is_cuda:
        # a copy in memory that is not page-locked, which the forked writer of a checkpoint could not read
        return torch.cat(pieces).view(like.dtype).view(like.shape)
    memory = torch.empty(0, dtype=torch.uint8).set_(pieces[0].untyped_storage())
    return memory.view(like.dtype).view(like.shape)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def first_reference(
    config: RunConfig,
    arch: Architecture,
    load: Callable[[Path], None],
    weights: Callable[[], Mapping[str, Tensor]],
) -> ReferencePolicy | None:
    """The reference policy that a run starts with; None if it has none. The model is left with the same weights.

    Args:
        config: configuration of the run.
        arch: architecture of the policy.
        load: fills this rank's model from a folder.
        weights: gives this rank's weights by name.

    Raises:
        ConfigError: the reference is of another architecture.

    Collectives: those of ``load``; one gather of texts over the world.
    """
    if not config.has_reference:
        return None
    folder = Path(config.reference.path or config.model.path)
    check_same_architecture(folder, arch)
    load(folder)
    return ReferencePolicy(
        weights, reset_every_steps=config.reference.reset_every_steps, files=folder_checksums(folder)
    )


def folder_checksums(folder: Path) -> dict[str, str]:
    """Checksum by name of the files with a model folder's weights; every rank reads a part of them.

    Collectives: one gather of texts over the world.
    """
    paths = frozen_files(folder)[dist.get_rank() :: dist.get_world_size()]
    mine = {path.name: file_checksum(path) for path in paths}
    every: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    return {name: checksum for part in every for name, checksum in sorted(part.items())}
