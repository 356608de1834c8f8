"""Frozen weights that replicas share: each rank keeps a part of every layer, and has a whole layer while it computes.

What is gathered together is a **unit**: a transformer layer, the embedding or the output layer. In a forward pass a
unit is whole from right before its own forward to right after it, in a backward pass from the gradient of its output
to that of its input, with what is recomputed in between. The unit that comes next is on its way meanwhile. So a rank
holds its parts and two layers at most. Norms outside layers stay whole.

The numbers are those that every rank would hold, so every result is the same bit for bit.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.distributed.vocab_parallel import TokenScores

ALIGNMENT = 256
"""Bytes: where a weight begins in its buffer, as it would in memory of its own. The planner counts with it."""


def emptied(layer: type) -> type:
    """A class of layers whose weights have no memory once a layer is built, so that never all layers have.

    ``FrozenShards`` gives them theirs.
    """

    class Emptied(layer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.to(device=cpu_platform.device(), dtype=kwargs["config"].params_dtype)
            for parameter in self.parameters():
                parameter.data.untyped_storage().resize_(0)

    return Emptied


class _Buffer:
    """The weights of a unit that the same ranks share, byte after byte; each of them keeps an equal part.

    The weights look into one storage for good. It is empty while nobody needs it, and what autograd has saved of them
    is valid again when it is filled.

    Args:
        weights: their values are lost.
        group: ranks with the same ones.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        starts, end = [], 0
        for weight in weights:
            starts.append(end)
            end += -(-weight.nbytes // ALIGNMENT) * ALIGNMENT
        part_bytes = -(-end // (group.size() * ALIGNMENT)) * ALIGNMENT
        device = weights[0].device
        self._group = group
        self._work: Any = None
        self._part = torch.zeros(part_bytes, dtype=torch.uint8, device=device)
        self._whole = torch.empty(group.size() * part_bytes, dtype=torch.uint8, device=device)
        for weight, start in zip(weights, starts, strict=True):
            # a weight keeps a version counter of its own: to fill the buffer changes nothing that autograd has saved
            weight.data = self._whole[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
        self.free()

    def allocate(self) -> None:
        self._whole.untyped_storage().resize_(self._whole.nbytes)

    def begin(self) -> None:
        self.allocate()
        self._work = dist.all_gather_into_tensor(self._whole, self._part, group=self._group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def keep(self) -> None:
        self._part.copy_(self._whole.chunk(self._group.size())[self._group.rank()])

    def free(self) -> None:
        self._whole.untyped_storage().resize_(0)


class _Unit:
    """What is gathered together.

    Args:
        weights: by name, as in the name tables. Those that no other rank has stay whole.

    Attributes:
        names: names of the weights that are shared.
        is_held: they are whole, or on their way.
        next: what comes next in a forward pass; None: it is not known.
        before: what comes next in a backward pass; None: likewise, or nothing.
    """

    def __init__(self, weights: Mapping[str, torch.nn.Parameter]) -> None:
        self.names: tuple[str, ...] = ()
        self.is_held = False
        self.next: _Unit | None = None
        self.before: _Unit | None = None
        self._buffers: list[_Buffer] = []
        experts = {name: one for name, one in weights.items() if not getattr(one, "allreduce", True)}
        dense = {name: one for name, one in weights.items() if name not in experts}
        for own, group in (
            (dense, parallel_state.get_data_parallel_group(with_context_parallel=True)),
            (experts, parallel_state.get_expert_data_parallel_group()),
        ):
            if own and group.size() > 1:
                self.names += tuple(own)
                self._buffers.append(_Buffer(list(own.values()), group))
            else:
                for one in own.values():
                    one.data = torch.empty_like(one)

    def begin(self) -> None:
        """Starts to gather. Collectives: an all-gather over dp and cp; of experts over their own replicas."""
        if not self.is_held:
            self.is_held = True
            for buffer in self._buffers:
                buffer.begin()

    def wait(self) -> None:
        for buffer in self._buffers:
            buffer.wait()

    def free(self) -> None:
        if self.is_held:
            self.is_held = False
            for buffer in self._buffers:
                buffer.wait()
                buffer.free()

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Has memory for the weights within, of whose values this rank's part is kept."""
        for buffer in self._buffers:
            buffer.allocate()
        yield
        for buffer in self._buffers:
            buffer.keep()
            buffer.free()


class FrozenShards:
    """The weights of a rank's model chunks that it shares with others.

    All ranks of a pipeline stage must make the same passes, since each takes part in every gather.

    Args:
        chunks: the rank's parts of the model, in order, with ``emptied`` layers; ``fill`` gives them values.
        weights: their parameters by name, as in the name tables.
    """

    def __init__(self, chunks: Sequence[Any], weights: Mapping[str, torch.nn.Parameter]) -> None:
        self._units: list[_Unit] = []
        self._of_weight: dict[str, _Unit] = {}
        self._output: _Unit | None = None
        self._last: _Unit | None = None
        names = {id(parameter): name for name, parameter in weights.items()}
        for chunk in chunks:
            before: _Unit | None = None  # whose backward pass needs weights
            embedding = self._unit(chunk.embedding, names) if chunk.pre_process else None
            if embedding is not None:
                _hook_embedding(chunk.embedding, embedding, self._take)
            for layer in chunk.decoder.layers:
                unit = self._unit(layer, names)
                unit.before = before
                for previous in (before, embedding if before is None else None):
                    if previous is not None:
                        previous.next = unit
                _hook_layer(layer, unit, self._take)
                before = unit
            if chunk.post_process:
                self._last, self._output = before, self._unit_of_output(chunk, names)
                if before is not None:
                    before.next = self._output

    def _unit(self, module: torch.nn.Module, names: Mapping[int, str]) -> _Unit:
        unit = _Unit({names[id(parameter)]: parameter for parameter in module.parameters()})
        self._units.append(unit)
        self._of_weight |= dict.fromkeys(unit.names, unit)
        return unit

    def _unit_of_output(self, chunk: Any, names: Mapping[int, str]) -> _Unit:
        """That of the embedding, where it is the same matrix in the same place."""
        found = self._of_weight.get(names[id(chunk.output_weight())])
        return self._unit(chunk.output_layer, names) if found is None else found

    def _take(self, unit: _Unit, then: _Unit | None) -> None:
        """Has a unit whole, and another one on its way; a pass needs none of the others."""
        for other in self._units:
            if other is not unit and other is not then:
                other.free()
        unit.begin()
        if then is not None:
            then.begin()
        unit.wait()

    def with_output(self, score: Callable[[Tensor], TokenScores], hidden: Tensor) -> TokenScores:
        """Runs the output layer, on the last stage.

        Args:
            score: reads the output layer's weights; its log-probs alone have gradients.
            hidden: what it is called with, ``[P, H]``.

        Collectives: those of ``score``; a gather of the output layer, and in backward another one, of the last layer
            too.
        """
        output = self._output
        assert output is not None, "other stages have no output layer"
        self._take(output, None)
        found = score(hidden)
        output.free()
        if found.logprobs.requires_grad:
            _at_gradient(found.logprobs, lambda _: self._take(output, self._last))
            _at_gradient(hidden, lambda _: output.free())
        return found

    def fill(self, names: Collection[str]) -> Iterator[Collection[str]]:
        """All names, unit by unit, for who writes the weights while it is their turn.

        Communication: none: every rank writes the whole of a unit and keeps its part.
        """
        for unit in self._units:
            with unit.filled():
                yield unit.names
        yield [name for name in names if name not in self._of_weight]

    @contextmanager
    def filled_together(self) -> Iterator[None]:
        """Has memory for all weights at once within, for who writes them in an order of his own."""
        with ExitStack() as stack:
            for unit in self._units:
                stack.enter_context(unit.filled())
            yield

    def in_turns(self, wanted: Mapping[int, Collection[str]]) -> Iterator[int]:
        """Numbers of turns, in each of which what any rank of the pipeline stage wants then is whole.

        Args:
            wanted: names of weights by the number of the turn; ranks may want different ones, in different turns.

        Yields:
            Every number that a rank of the stage has, in order.

        Collectives: one gather of numbers over the world; in each turn those of its units.
        """
        places = {unit: place for place, unit in enumerate(self._units)}
        mine = {
            number: {places[self._of_weight[name]] for name in names if name in self._of_weight}
            for number, names in wanted.items()
        }
        stage = parallel_state.get_pipeline_model_parallel_rank()
        every: list[tuple[int, dict[int, set[int]]]] = [(stage, mine)] * dist.get_world_size()
        dist.all_gather_object(every, (stage, mine))
        turns: dict[int, set[int]] = {}
        for number, theirs in ((n, one) for other, told in every if other == stage for n, one in told.items()):
            turns.setdefault(number, set()).update(theirs)
        for number in sorted(turns):
            here = [unit for place, unit in enumerate(self._units) if place in turns[number]]
            for unit in self._units:
                if unit not in here:
                    unit.free()
            for unit in here:
                unit.begin()
            for unit in here:
                unit.wait()
            yield number
        for unit in self._units:
            unit.free()


Take = Callable[[_Unit, _Unit | None], None]


def _hook_embedding(embedding: torch.nn.Module, unit: _Unit, take: Take) -> None:
    """Its backward pass needs no weights: nothing is before it."""
    embedding.register_forward_pre_hook(lambda *_: take(unit, unit.next))
    embedding.register_forward_hook(lambda *_: unit.free())


def _hook_layer(layer: torch.nn.Module, unit: _Unit, take: Take) -> None:
    """Gathers a layer for its forward and backward pass.

    The gradient of its input is there when every product with its weights is done. A layer that is recomputed runs
    within the backward pass, and its own backward pass follows at once: it is not freed in between.
    """

    def before_forward(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(unit, unit.before if _is_in_backward() else unit.next)
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if torch.is_grad_enabled() and hidden.requires_grad:
            _at_gradient(hidden, lambda _: unit.free())

    def after_forward(_: torch.nn.Module, __: Any, outputs: Iterable[Any]) -> None:
        if not _is_in_backward():
            unit.free()
        for output in outputs:
            if isinstance(output, Tensor) and output.requires_grad:
                _at_gradient(output, lambda _: take(unit, unit.before))

    layer.register_forward_pre_hook(before_forward, with_kwargs=True)
    layer.register_forward_hook(after_forward)


def _at_gradient(tensor: Tensor, call: Callable[[Tensor], None]) -> None:
    """Calls something when a tensor's gradient is complete."""
    tensor.register_hook(call)  # type: ignore[no-untyped-call]


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
