"""Run as a program: a rank whose layers are Megatron's own for Transformer Engine, experts grouped, as on a GPU.

    python -m tests.distributed.grouped_rank TASK RANK

``TASK`` is a pickled :class:`GroupedTask`. Transformer Engine itself is not installed: a stand-in has the modules that
Megatron's layers are made of, which hold parameters and extra states under Transformer Engine's names and compute
nothing. So names, shapes, halves of gated matrices, shards and replicas of a checkpoint are those of Megatron's code,
and what it is told of Transformer Engine is what this file says.
"""

import importlib
import importlib.abc
import importlib.machinery
import pickle
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch


@dataclass(frozen=True, kw_only=True)
class GroupedTask:
    """What the ranks do.

    Attributes:
        config: of the run.
        init_method: where they meet.
        source: checkpoint to load; empty: the model folder's weights.
        target: where to save.
    """

    config: Any
    init_method: str
    source: str
    target: str


class _Layer(torch.nn.Module):
    """Every layer of Transformer Engine has an extra state, empty without float8."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None or not state.numel()

    def _hold(self, name: str, *shape: int, dtype: torch.dtype) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.zeros(*shape, dtype=dtype)))


class _Linear(_Layer):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_size: int,
        parallel_mode: str | None,
        bias: bool,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        super().__init__()
        self.use_bias = bias
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        self._hold("weight", rows, columns, dtype=params_dtype)
        if bias:
            self._hold("bias", rows, dtype=params_dtype)


class _LayerNormLinear(_Linear):
    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self._hold("layer_norm_weight", in_features, dtype=options["params_dtype"])


class _GroupedLinear(_Layer):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        tp_size: int,
        parallel_mode: str | None,
        bias: bool,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False}
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        for number in range(num_gemms):
            self._hold(f"weight{number}", rows, columns, dtype=params_dtype)
            if bias:
                self._hold(f"bias{number}", rows, dtype=params_dtype)

    def init_fp8_metadata(self, **_: Any) -> None:
        """There is none."""


class _RMSNorm(_Layer):
    def __init__(
        self, *, params_dtype: torch.dtype, hidden_size: int = 0, normalized_shape: int = 0, **_: Any
    ) -> None:  # Megatron-core 0.16.1 gives the older of the two names
        super().__init__()
        self._hold("weight", hidden_size or normalized_shape, dtype=params_dtype)


class _DotProductAttention(_Layer):
    def __init__(
        self, num_attention_heads: int, *_: Any, tp_size: int, softmax_type: str = "vanilla", **__: Any
    ) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self._hold("softmax_offset", num_attention_heads // tp_size, dtype=torch.float32)
        # Transformer Engine's own, for checkpoints that are older than this layer's state
        self.register_load_state_dict_post_hook(_forgive_absence)


def _forgive_absence(module: Any, incompatible: Any) -> None:
    del module
    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if not key.endswith("core_attention._extra_state")]


class _Named(type):
    """A class that nobody makes an instance of, but Megatron names it, or something in it, while it is imported."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-in, but not its optimizers and its offloading, for which Megatron has substitutes."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        package, last = name.split(".")[0], name.rpartition(".")[2]
        if package != "transformer_engine" or last in ("optimizers", "cpu_offload"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = _Module(spec.name)
        if spec.name == "transformer_engine":
            vars(module)["__version__"] = "2.20.2"
        if spec.name == "transformer_engine.pytorch":
            vars(module).update(
                Linear=_Linear,
                LayerNormLinear=_LayerNormLinear,
                GroupedLinear=_GroupedLinear,
                RMSNorm=_RMSNorm,
                DotProductAttention=_DotProductAttention,
            )
        return module

    def exec_module(self, module: Any) -> None:
        """Nothing is to be run."""


def main(task: GroupedTask, rank: int) -> None:
    sys.meta_path.insert(0, _Finder())
    importlib.import_module("transformer_engine.common.recipe")
    from gtpo_megatron.actor import actor as actor_module
    from gtpo_megatron.actor import cpu_platform, trained_model

    def as_on_a_gpu(build: Any) -> Any:
        def built(*args: Any, **options: Any) -> Any:
            with (
                mock.patch.object(cpu_platform, "is_cpu", return_value=False),
                mock.patch.object(cpu_platform, "device", return_value=torch.device("cpu")),
            ):
                return build(*args, **options)

        return built

    def configured(*args: Any) -> Any:
        config = as_on_a_gpu(transformer_config)(*args)
        # where values and indices are made, which are of no concern to a checkpoint
        config.use_cpu_initialization, config.moe_permute_fusion = True, False
        return config

    transformer_config, build_chunks = trained_model.transformer_config, trained_model.build_chunks
    trained_model.transformer_config, trained_model.build_chunks = configured, as_on_a_gpu(build_chunks)
    actor = actor_module.MegatronActor(task.config, global_rank=rank, init_method=task.init_method)
    names = [name for chunk in actor._chunks for name, _ in chunk.named_parameters()]
    assert any(name.endswith("mlp.experts.linear_fc1.weight0") for name in names), "experts are grouped"
    assert any(name.endswith("linear_qkv.layer_norm_weight") for name in names), "norms are fused"
    if task.source:
        actor.checkpoint.load(Path(task.source), checksums={})
    actor.checkpoint.begin(Path(task.target), in_background=False)
    actor.checkpoint.finish()
    actor.close()


if __name__ == "__main__":
    main(pickle.loads(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]))
