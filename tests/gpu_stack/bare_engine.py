"""vLLM's CUDA build and Ray on the versions of a bare machine, without a GPU: they load, and take what a run asks.

    python -m tests.gpu_stack.bare_engine        # with what ``tools/gpu_proof.sh pack`` brings on the module path

The driver's library is one that has its names and can do nothing, and vLLM is told that there is an H100. What it would
ask of a GPU is not reached: kernels, compilation, memory. Ray is a run's own, with one process in it.
"""

import dataclasses
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

DRIVER = "libcuda.so.1"
REEXECUTED = "GTPO_TEST_DRIVER"

MODULES = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.llama",
    "vllm.device_allocator.cumem",
    "gtpo_megatron.rollout.weight_engine",
    "gtpo_megatron.rollout.vllm_worker",
    "gtpo_megatron.rollout.sampled_entropy",
    "gtpo_megatron.train",
    "ray",
)
"""What a run imports of vLLM, and of ours beside it."""


OPERATORS = (("_C", "silu_and_mul"), ("_C", "rotary_embedding"), ("_C_cache_ops", "reshape_and_cache_flash"))
"""Of the extensions, which register them for this torch."""


def make_driver(folder: Path, libraries: list[Path]) -> None:
    """Compiles a driver's library with every function of it that extensions name; each says that there is no device."""
    named = set()
    for library in libraries:
        printed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        names = [line.split()[-1] for line in printed.stdout.splitlines()]
        named |= {name for name in names if name.startswith("cu") and name[2:3].isupper()}
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(named)), encoding="utf-8")
    link = [f"-Wl,-soname,{DRIVER}", "-o", str(folder / DRIVER)]
    subprocess.run(["cc", "-shared", "-fPIC", *link, str(source)], check=True)


def engine_config():
    """vLLM's configuration of the engine of the recipe for one GPU: as our engine asks for it, on an H100."""
    import triton.backends

    triton.backends.backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    from vllm import platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    platform = cuda.NonNvmlCudaPlatform
    platform.get_device_capability = classmethod(lambda *_, **__: DeviceCapability(9, 0))
    platform.get_device_name = classmethod(lambda *_, **__: "NVIDIA H100 80GB HBM3")
    platform.get_device_total_memory = classmethod(lambda *_, **__: 80 << 30)
    platforms._current_platform = platform()
    platform.import_kernels()
    for name in MODULES:
        importlib.import_module(name)
    import torch
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from gtpo_megatron.rollout.vllm_engine import VllmEngine
    from recipes import qwen2_5_0_5b, tiny_cpu

    config = qwen2_5_0_5b.gtpo_1gpu()
    asked: dict[str, object] = {}

    class StopHereError(Exception):
        pass

    def llm(**options):
        asked.update(options)
        raise StopHereError

    with mock.patch.object(vllm, "LLM", llm), mock.patch.object(torch.cuda, "is_available", return_value=True):
        try:
            folder = str(tiny_cpu.ASSETS / "tiny_qwen2")
            rollout = dataclasses.replace(config.rollout, entropy_source="rollout")
            VllmEngine(folder, rollout, max_sequence_tokens=config.model.max_sequence_tokens, seed=0)
        except StopHereError:
            pass
    asked.pop("use_tqdm_on_load", None)
    return EngineArgs(**asked).create_engine_config(UsageContext.LLM_CLASS)


def check() -> None:
    import torch

    found = engine_config()
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    assert get_flash_attn_version() == 3
    for library, operator in OPERATORS:
        assert hasattr(getattr(torch.ops, library), operator), f"vLLM's extensions have registered no {operator}"
    for name in ("mode", "cudagraph_mode", "backend"):
        print(f"{name}: {getattr(found.compilation_config, name)}")


def check_ray() -> None:
    """A run's own Ray starts, and one of its processes imports what a rank and an engine do."""
    import ray

    from gtpo_megatron.config.cluster import ClusterConfig
    from gtpo_megatron.orchestration.on_ray.cluster import join_cluster
    from gtpo_megatron.orchestration.on_ray.collect import Deadline

    def imported() -> list[str]:
        import vllm

        import gtpo_megatron.actor.actor

        return [gtpo_megatron.actor.actor.__name__, vllm.__version__]

    with tempfile.TemporaryDirectory() as scratch:
        config = ClusterConfig(object_store_mib=128)
        join_cluster(config, deadline=Deadline(config.start_deadline_s), temp_folder=Path(scratch))
        print("Ray:", ray.__version__, ray.get(ray.remote(imported).options(num_cpus=0).remote(), timeout=300))
        ray.shutdown()


def main() -> None:
    if os.environ.get(REEXECUTED):
        check()
        check_ray()
        return
    (folder,) = [Path(one) / "vllm" for one in sys.path if (Path(one) / "vllm" / "platforms").is_dir()][:1]
    with tempfile.TemporaryDirectory() as scratch:
        make_driver(Path(scratch), sorted(folder.rglob("*.so")))
        path = os.pathsep.join([scratch, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        environment = os.environ | {"LD_LIBRARY_PATH": path, REEXECUTED: "1", "VLLM_CONFIGURE_LOGGING": "0"}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        raise SystemExit(subprocess.run([sys.executable, "-m", __spec__.name], env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
