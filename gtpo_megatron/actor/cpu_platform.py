"""Tells Megatron-core that there is no CUDA. Does nothing on a machine with CUDA.

Megatron-core (0.16.1 and 0.19.2) asks for the current CUDA device, names ``device="cuda"`` in places, and keeps its
random states on the GPU. Each function below answers one of those questions for the CPU, ``cpu_experts.py`` those of
a mixture of experts; none changes a number, but ``_rotate_by_tiles`` some roundings. Other files choose a device for
their own tensors, but tell Megatron nothing. docs/adr/0006 names all changes made to another library at run time.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gtpo_megatron.actor import cpu_experts

_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like", "zeros_like", "rand", "randn")

_LITERAL_MODULES = (
    "megatron.core.pipeline_parallel.schedules",  # total_num_tokens
    "megatron.core.optimizer.clip_grads",  # norms, number of zeros
    "megatron.core.optimizer.optimizer",  # found_inf, scale
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.transformer.utils",  # causal mask
    "megatron.core.utils",  # local norms
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.async_utils",
)
"""Modules with ``device="cuda"`` written out."""

_STREAM = cpu_experts.FinishedWork()
"""The one stream: code that compares streams must find them equal."""


def is_cpu() -> bool:
    """No CUDA device is there."""
    return not torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Layers are Transformer Engine's: on a GPU where it is installed. Else they are Megatron's own."""
    return not is_cpu() and importlib.util.find_spec("transformer_engine") is not None


def device() -> torch.device:
    """Device of this rank's tensors."""
    return torch.device("cpu") if is_cpu() else torch.device("cuda", torch.cuda.current_device())


@functools.cache
def install() -> None:
    """Prepares Megatron-core for this machine; idempotent. Call before importing ``megatron.core``."""
    if not is_cpu():
        return
    _answer_device_questions()
    _leave_functions_as_they_are()
    _redirect_device_literals()
    _keep_random_states_on_cpu()
    _name_cpu_tensors_as_megatron_expects()
    _fix_distributed_optimizer_loading()
    cpu_experts.install(_STREAM)
    _rotate_by_tiles()


def _answer_device_questions() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _STREAM
    # `.cuda()` is called on tied embeddings and by the optimizer's reload
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _leave_functions_as_they_are() -> None:
    """Megatron's ``jit_fuser`` is ``torch.compile`` from its import on: on a CPU minutes of C++ for nothing.

    And the compiler's own import, by the first function that is to be compiled, takes as long as Megatron's.
    """
    compile_ = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        from megatron.core import jit
    finally:
        torch.compile = compile_
    jit.disable_jit_fuser()  # for modules that are imported later


class CpuTorch(types.ModuleType):
    """``torch`` as one Megatron module sees it: factory functions put ``device="cuda"`` on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, self._on_cpu(getattr(torch, name)))

    @staticmethod
    def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def call(*args: Any, **kwargs: Any) -> Any:
            wanted = kwargs.get("device")
            if wanted is not None and torch.device(wanted).type == "cuda":
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _redirect_device_literals() -> None:
    proxy = CpuTorch()
    for name in _LITERAL_MODULES:
        with contextlib.suppress(ModuleNotFoundError):  # the two versions do not have all of them
            importlib.import_module(name).torch = proxy  # type: ignore[attr-defined]


@contextlib.contextmanager
def one_group_of_one_rank() -> Iterator[None]:
    """While Megatron makes its groups, of which most of a small world have one rank, all those of a rank are one.

    Each of gloo's has threads that wake a hundred times a second. Nobody waits in a group for itself; larger ones stay
    apart, whatever their ranks, since what is under way in two of them may be so in any order.
    """
    if not is_cpu():
        yield
        return
    from megatron.core import parallel_state

    create, made = parallel_state.create_group, dict[int, Any]()

    def create_once(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        if len(ranks) > 1:
            return create(ranks, *args, **kwargs)
        if ranks[0] not in made:
            made[ranks[0]] = create(ranks, *args, **kwargs)
        return made[ranks[0]]

    parallel_state.create_group = create_once
    try:
        yield
    finally:
        parallel_state.create_group = create


def _keep_random_states_on_cpu() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    class CpuRngStatesTracker(megatron_random.CudaRNGStatesTracker):
        """Megatron's tracker of named random states, on the CPU's generator."""

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise RuntimeError(f"random state {name!r} or seed {seed} is registered already")
            self.seeds_.add(seed)
            kept = torch.get_rng_state()
            torch.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(kept)

        @contextlib.contextmanager
        def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            kept = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(kept)

    replacements = {
        "CudaRNGStatesTracker": CpuRngStatesTracker,
        "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    for module in list(sys.modules.values()):  # some modules hold these by name
        if getattr(module, "__name__", "").startswith("megatron.core"):
            for name, value in replacements.items():
                if name in vars(module):
                    setattr(module, name, value)


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    original = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return call


def _name_cpu_tensors_as_megatron_expects() -> None:
    """The optimizers sort parameters by comparing ``tensor.type()`` with 'torch.cuda.FloatTensor'."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    clip = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = clip
    optimizer.clip_grad_by_total_norm_fp32 = clip
    distributed = distrib_optimizer.DistributedOptimizer
    distributed._build_model_and_main_param_groups = classmethod(
        _with_cuda_type_names(distributed._build_model_and_main_param_groups.__func__)
    )
    for kind in (distributed, optimizer.Float16OptimizerWithFloat16Params):
        kind.__init__ = _with_cuda_type_names(kind.__init__)


def _fix_distributed_optimizer_loading() -> None:
    """Without Transformer Engine the inner optimizer is torch's Adam, whose ``step`` is a tensor of every parameter.

    The loader hands one ``step`` tensor to all of them, and Adam would count it once per parameter; and for float32
    models it copies into leaf views outside ``no_grad``.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group_index, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group_index]["params"][order]
        targets = {"param": main, **self.optimizer.state[main]}
        with torch.no_grad():
            for name, value in tensors.items():
                if name in targets:
                    targets[name].copy_(value)

    load = DistributedOptimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
        return result

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    DistributedOptimizer.load_state_dict = load_state_dict


def _rotate_by_tiles() -> None:
    """Rotary embeddings, which Megatron fuses on a GPU and otherwise makes in nine passes over all tokens."""
    from megatron.core.models.common.embeddings import rope_utils

    from gtpo_megatron.actor import cpu_tiles

    rope_utils._apply_rotary_pos_emb_bshd = cpu_tiles.rotating(rope_utils._apply_rotary_pos_emb_bshd)
