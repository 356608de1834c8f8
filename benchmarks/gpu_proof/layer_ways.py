"""Ways to compute the trainer's layers with fewer launches, each put in place for a while and taken away again.

None is a setting of the trainer: a way replaces the ``forward`` of Megatron's layers, or switches of their
configuration, on a trainer that is built already. All but the fusions are for micro-batches of one shape: equally many
sequences of equal lengths.
"""

# ruff: noqa: TID251 - a way to compute Megatron's layers asks Megatron

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Switch = Callable[[], AbstractContextManager[None]]
"""Puts a way in place, until the context ends."""

RECOMPILES = 64
"""Graphs that torch.compile may make of one layer's code: every layer may ask for its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What a micro-batch hands to each layer.

    Attributes:
        hidden: ``[p, 1, H]``, of the first layer.
        fixed: all other arguments; those of any micro-batch of the same shape are equal.
    """

    hidden: Tensor
    fixed: dict[str, Any]


def layers_of(actor: Any) -> list[Any]:
    """Of a trainer of one rank."""
    return list(actor._chunks[0].decoder.layers)


def call_of(actor: Any, run: Callable[[], object]) -> Call:
    """Runs a micro-batch and keeps what its first layer was called with."""
    found: list[dict[str, Any]] = []

    def keep(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append({**dict(zip(("hidden_states",), args, strict=False)), **kwargs})

    hook = layers_of(actor)[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        run()
    finally:
        hook.remove()
    fixed = dict(found[0])
    return Call(hidden=fixed.pop("hidden_states").detach(), fixed=fixed)


def as_it_was(actor: Any, call: Call) -> Switch:
    """Layers ask the device where sequences start, and turn sequence after sequence: what the trainer does without."""
    longest = call.fixed["packed_seq_params"].max_seqlen_q

    def ask_the_device(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        packed = kwargs["packed_seq_params"]
        packed.cu_seqlens_q = packed.cu_seqlens_kv = packed.cu_seqlens_q.to(call.hidden.device)
        return args, {**kwargs, "rotary_pos_emb": kwargs["rotary_pos_emb"][:longest]}

    @contextlib.contextmanager
    def switch() -> Iterator[None]:
        hook = actor._chunks[0].decoder.register_forward_pre_hook(ask_the_device, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    return switch


def fused(*flags: str) -> Callable[[Any, Call], Switch]:
    """Megatron's own fusions that need no library of NVIDIA's: it compiles these functions with torch.compile."""

    def make(actor: Any, _: Call) -> Switch:
        configs = {
            id(module.config): module.config for module in actor._chunks[0].modules() if hasattr(module, "config")
        }

        @contextlib.contextmanager
        def switch() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for config in configs.values():
                    for flag in flags:
                        stack.enter_context(mock.patch.object(config, flag, True))
                yield

        return switch

    return make


def missing_fusions() -> dict[str, str]:
    """Megatron's switches that local layers cannot use here, and what each asks for."""
    from megatron.core.fusions import fused_layer_norm
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import layers

    found = {"masked_softmax_fusion": "without effect: attention is torch's, whose kernel has mask and softmax in it"}
    if rope_utils.fused_apply_rotary_pos_emb_thd is None:
        found["apply_rope_fusion"] = "Transformer Engine"
    if not layers._grad_accum_fusion_available:
        found["gradient_accumulation_fusion"] = "Apex's fused_weight_gradient_mlp_cuda"
    if not fused_layer_norm.HAVE_PERSIST_LAYER_NORM:
        found["persist_layer_norm"] = "Apex's fast_layer_norm, which has no RMSNorm"
    return found


@contextlib.contextmanager
def _turned_by_angles() -> Iterator[None]:
    """Megatron's rotary embedding of packed sequences looks at nothing but their packed angles."""
    from megatron.core.models.common.embeddings import rope_utils

    def turn(t: Tensor, _: object, freqs: Tensor, *, mscale: float = 1.0, **options: Any) -> Tensor:
        interleaved = options.get("rotary_interleaved", False)
        turned: Tensor = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs, interleaved, mscale=mscale)
        return turned.squeeze(1)

    with mock.patch.object(rope_utils, "_apply_rotary_pos_emb_thd", turn):
        yield


def _say_nothing(*_: object, **__: object) -> None:
    """In the place of a warning; a mock cannot be traced."""


def compiled(actor: Any, call: Call) -> Switch:
    """torch.compile of each layer's forward, for this shape alone; the first pass of each kind compiles.

    Without a GPU nothing is compiled in the end: layers are traced, and what was traced is run as it is.
    """
    torch._dynamo.reset()
    backend = "inductor" if call.hidden.is_cuda else "aot_eager"
    packed, layers = call.fixed["packed_seq_params"], layers_of(actor)
    config = layers[0].self_attention.config
    if any(config.no_rope_freq or ()):
        raise ValueError("layers without a rotary embedding need graphs of their own")

    def bind(forward: Any) -> Any:
        made = torch.compile(forward, dynamic=False, backend=backend)

        def call_made(hidden_states: Tensor, **others: Any) -> Any:
            # with the strides of every layer's output, or the first layer would have a graph of its own
            return made(hidden_states.squeeze(1).unsqueeze(1), **others | {"packed_seq_params": packed})

        return call_made

    forwards = [bind(layer.forward) for layer in layers]
    attentions = [layer.self_attention.core_attention for layer in layers]
    attends = [_attention_of_equal_lengths(attention, packed.cu_seqlens_q.tolist()) for attention in attentions]

    @contextlib.contextmanager
    def switch() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # the trainer switches torch.compile off on a CPU
            stack.enter_context(torch._dynamo.config.patch(disable=False, recompile_limit=RECOMPILES))
            # what Megatron's linear layers may warn of would cut each layer in pieces
            stack.enter_context(mock.patch.object(warnings, "warn", _say_nothing))
            # a layer asks this list with its number, and would have a graph of its own
            stack.enter_context(mock.patch.object(config, "no_rope_freq", None))
            stack.enter_context(_turned_by_angles())
            stack.enter_context(_forwards(attentions, attends))
            stack.enter_context(_forwards(layers, forwards))
            yield

    return switch


def _attention_of_equal_lengths(attention: Any, bounds: Sequence[int]) -> Any:
    """The trainer's attention of packed sequences without its search for equal neighbours, which cannot be traced."""
    from gtpo_megatron.actor.model.core_attention import Block

    count, length = len(bounds) - 1, bounds[1]
    if list(bounds) != list(range(0, count * length + 1, length)):
        raise ValueError(f"sequences start at {bounds}: all must have the length of the first")
    whole = (0, count * length)
    blocks = [Block(whole, (whole,), count)]

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return attention._by_torch(query, key, value, blocks).flatten(1)  # type: ignore[no-any-return]

    return forward


@contextlib.contextmanager
def _forwards(modules: Sequence[Any], forwards: Sequence[Any]) -> Iterator[None]:
    """Other functions in the place of the modules' own."""
    with contextlib.ExitStack() as stack:
        for module, forward in zip(modules, forwards, strict=True):
            stack.enter_context(mock.patch.object(module, "forward", forward))
        yield


class _Segment(torch.nn.Module):
    """Neighbouring layers with fixed arguments, from hidden states to hidden states."""

    def __init__(self, layers: Sequence[torch.nn.Module], fixed: dict[str, Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self._fixed = fixed

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden, _ = layer(hidden_states=hidden, **self._fixed)
        return hidden


def graphed(*, at_once: bool, first: Callable[[Any, Call], Switch] | None = None) -> Callable[[Any, Call], Switch]:
    """CUDA graphs of forward and backward, by ``torch.cuda.make_graphed_callables``.

    Args:
        at_once: one graph of all layers, not one a layer.
        first: a way that is in place while the graphs are captured.
    """

    def make(actor: Any, call: Call) -> Switch:
        layers = layers_of(actor)
        groups = [layers] if at_once else [[layer] for layer in layers]
        with contextlib.ExitStack() as stack:
            if first is not None:
                stack.enter_context(first(actor, call)())
            segments = tuple(_Segment(group, call.fixed) for group in groups)
            samples = tuple((torch.randn_like(call.hidden).requires_grad_(),) for _ in segments)
            graphs = torch.cuda.make_graphed_callables(segments, samples, allow_unused_input=True)

        def replay(graph: Any) -> Any:
            return lambda hidden_states, **_: (graph(hidden_states), None)

        def nothing(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
            return hidden_states, None

        forwards = [replay(graph) for graph in graphs]
        forwards += [nothing] * (len(layers) - len(forwards))
        return lambda: _forwards(layers, forwards)

    return make


@contextlib.contextmanager
def megatron_s_graphs() -> Iterator[None]:
    """Trainers that are built meanwhile ask Megatron for its own CUDA graphs of each layer."""
    from megatron.core import tensor_parallel

    from gtpo_megatron.actor.model import transformer_config as made

    config, seed = made.TransformerConfig, tensor_parallel.model_parallel_cuda_manual_seed

    def with_graphs(**options: Any) -> Any:
        return config(**options, cuda_graph_impl="local", cuda_graph_warmup_steps=1)

    def for_graphs(*args: Any, **options: Any) -> Any:
        return seed(*args, **options, use_cudagraphable_rng=True)

    with (
        mock.patch.object(made, "TransformerConfig", with_graphs),
        mock.patch.object(tensor_parallel, "model_parallel_cuda_manual_seed", for_graphs),
    ):
        yield
