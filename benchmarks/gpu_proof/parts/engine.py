"""A vLLM engine sleeps and wakes: what it gives back of the GPU, and that it answers as before."""

import dataclasses
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu_proof.models import make_folder
from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import ModelSize, Sizes
from benchmarks.gpu_proof.training_runs import lacking
from gtpo_megatron.config.rollout import RolloutConfig
from recipes import tiny_cpu

MIB = 1 << 20


def run(report: Report, sizes: Sizes) -> None:
    with report.section("a vLLM engine sleeps and wakes") as section:
        if reason := lacking(sizes.device):
            section.skip(reason)
        else:
            _engine(section, sizes.models[0], sizes)


def _engine(section: Section, size: ModelSize, sizes: Sizes) -> None:
    """Free memory of the device while an engine is awake, asleep, and awake again; and that it answers the same."""
    is_gpu = sizes.device.type == "cuda"
    config = RolloutConfig(
        placement="colocated" if is_gpu else "disaggregated",
        kv_cache_mib=8192 if is_gpu else 64,
        max_concurrent_sequences=16,
        dtype=sizes.dtype,
    )
    from gtpo_megatron.rollout.engine_arguments import engine_environment

    os.environ.update(engine_environment(config, has_gpus=is_gpu))
    from gtpo_megatron.rollout.requests import SampleRequest
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_folder(folder, size, device=torch.device("cpu"))
        for file in (tiny_cpu.ASSETS / "tiny_qwen2").glob("*token*"):
            shutil.copy(file, folder)
        engine = VllmEngine(str(folder), config, max_sequence_tokens=64, seed=0)
        requests = [SampleRequest(prompt_ids=(5, 6, 7), group_id=0, sample=number) for number in range(4)]
        sampling = dataclasses.replace(config.sampling, max_response_tokens=8)
        first = engine.generate(requests, sampling, seed=0).response_ids
        awake = _free(sizes)
        began = time.perf_counter()
        engine.sleep(keep_weights=True)
        section.figure("falls asleep, weights kept on the host", time.perf_counter() - began, "s")
        asleep = _free(sizes)
        began = time.perf_counter()
        for what in ("weights", "kv_cache"):
            engine.wake(what)
        section.figure("wakes", time.perf_counter() - began, "s")
        section.figure("free while it sleeps, over while it is awake", (asleep - awake) / MIB, "MiB")
        section.figure("its cache", config.kv_cache_mib or 0, "MiB")
        again = engine.generate(requests, sampling, seed=0).response_ids
        section.require("tokens that differ after it woke", float((first != again).sum()), at_most=0)
        engine.close()


def _free(sizes: Sizes) -> int:
    return torch.cuda.mem_get_info()[0] if sizes.device.type == "cuda" else 0
