"""The module ``transformer_engine_torch``: enumerations, answers, and a refusal for everything else."""

import enum
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from tests.te_on_cpu import attention, context_parallel, matmul_and_norm, optimizer

NAME = "transformer_engine_torch"

CUDNN = 92000
"""9.20.0, in cuDNN's own form."""

CUBLAS = 130101

ENUMERATIONS = {
    "DType": ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"),
    "FP8FwdTensors": tuple(f"GEMM{i}_{kind}" for i in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")),
    "FP8BwdTensors": tuple(f"GRAD_{kind}{i}" for i in (1, 2, 3) for kind in ("OUTPUT", "INPUT")),
    "NVTE_QKV_Format": (
        *(f"NVTE_{name}" for name in ("SBHD", "BSHD", "THD", "BSHD_2SBHD", "SBHD_2BSHD", "THD_2BSHD", "THD_2SBHD")),
        *("NVTE_BHSD", "NVTE_QKV_Format_NOT_SET"),
    ),
    "NVTE_QKV_Layout": (
        *(f"NVTE_{name}" for name in ("SB3HD", "SBH3D", "SBHD_SB2HD", "SBHD_SBH2D", "SBHD_SBHD_SBHD")),
        *(f"NVTE_{name}" for name in ("BS3HD", "BSH3D", "BSHD_BS2HD", "BSHD_BSH2D", "BSHD_BSHD_BSHD")),
        *(f"NVTE_{name}" for name in ("T3HD", "TH3D", "THD_T2HD", "THD_TH2D", "THD_THD_THD")),
        *(f"NVTE_{name}" for name in ("SBHD_BSHD_BSHD", "BSHD_SBHD_SBHD", "THD_BSHD_BSHD", "THD_SBHD_SBHD")),
        *(f"NVTE_Paged_KV_{name}" for name in ("BSHD_BSHD_BSHD", "BSHD_SBHD_SBHD", "SBHD_BSHD_BSHD")),
        *(f"NVTE_Paged_KV_{name}" for name in ("SBHD_SBHD_SBHD", "THD_BSHD_BSHD", "THD_SBHD_SBHD")),
        *("NVTE_BHSD_BHSD_BHSD", "NVTE_QKV_Layout_NOT_SET"),
    ),
    "NVTE_Bias_Type": tuple(f"NVTE_{name}" for name in ("NO_BIAS", "PRE_SCALE_BIAS", "POST_SCALE_BIAS", "ALIBI")),
    "NVTE_Mask_Type": (
        *(f"NVTE_{name}_MASK" for name in ("NO", "PADDING", "CAUSAL", "PADDING_CAUSAL")),
        *(f"NVTE_{name}_MASK" for name in ("CAUSAL_BOTTOM_RIGHT", "PADDING_CAUSAL_BOTTOM_RIGHT")),
    ),
    "NVTE_Softmax_Type": tuple(f"NVTE_{name}_SOFTMAX" for name in ("VANILLA", "OFF_BY_ONE", "LEARNABLE")),
    "NVTEScalingMode": (
        *(f"NVTE_{name}" for name in ("DELAYED_TENSOR_SCALING", "MXFP8_1D_SCALING", "BLOCK_SCALING_1D")),
        *(f"NVTE_{name}" for name in ("BLOCK_SCALING_2D", "NVFP4_1D_SCALING", "INVALID_SCALING")),
    ),
    "CommOverlapType": ("RS", "AG"),
    "NVTERoutingMapFormat": ("BYTEMAP", "BITMAP_U8"),
    "NVTEQBHistogramMode": ("TWO_KERNEL", "FUSED_ATOMIC"),
}
"""Members in the order of the C++ headers, counted from 0."""

BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}

ANSWERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        matmul_and_norm.generic_gemm,
        matmul_and_norm.rmsnorm_fwd,
        matmul_and_norm.rmsnorm_bwd,
        matmul_and_norm.fused_rope_forward,
        matmul_and_norm.fused_rope_backward,
        attention.fused_attn_fwd,
        attention.fused_attn_bwd,
        context_parallel.thd_sequence_order_to_cp_rank_order,
        context_parallel.thd_cp_rank_order_to_sequence_order,
        context_parallel.thd_read_half_tensor,
        context_parallel.thd_second_half_lse_correction,
        context_parallel.thd_read_second_half_lse,
        context_parallel.thd_out_correction,
        context_parallel.thd_grad_correction,
        optimizer.multi_tensor_adam,
        optimizer.multi_tensor_l2norm,
        optimizer.multi_tensor_scale_tensor,
    )
}
"""What the actor calls."""

calls: Counter[str] = Counter()
"""How often each answer was asked for, in this process."""


class _Extension(types.ModuleType):
    """A name that nobody answers is a function that refuses, or a class of which there are no instances."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Any = type(name, (), {}) if name[0].isupper() else _refusal(name)
        setattr(self, name, found)
        return found


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{NAME}.{name} has no answer on a CPU; add one to tests/te_on_cpu")

    return refuse


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return call


def make_extension() -> types.ModuleType:
    """The module, of Transformer Engine 2.20.2."""
    module: Any = _Extension(NAME)
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    for name, members in ENUMERATIONS.items():
        setattr(module, name, enum.IntEnum(name, members, start=0))
    module.NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", BACKENDS)
    for name, function in ANSWERS.items():
        setattr(module, name, _counted(function))
    module.get_cudnn_version = lambda: CUDNN
    module.get_cublasLt_version = lambda: CUBLAS
    module.get_num_cublas_streams = lambda: 4
    module.FusedAttentionParams = types.SimpleNamespace
    module.get_fused_attn_backend = lambda _: (module.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, "")
    return module


def import_transformer_engine(folder: Path) -> None:
    """Imports the Python of Transformer Engine from a folder that its package was unpacked to.

    Its own ``__init__`` is run last: before it the libraries that there are none of must be out of the way.

    Args:
        folder: has ``transformer_engine`` and its ``dist-info``.
    """
    sys.path.append(str(folder))
    sys.modules[NAME] = make_extension()
    place = folder / "transformer_engine"
    spec = importlib.util.spec_from_file_location(
        "transformer_engine", place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["transformer_engine"] = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, {"NVTE_PROJECT_BUILDING": "1"}):  # which loads no libraries
        common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _: None
    spec.loader.exec_module(package)
    # which has the extension's names as far as they were known when it was imported
    names: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    names.__getattr__ = lambda name: getattr(sys.modules[NAME], name)
