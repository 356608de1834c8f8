"""Run as a program: an engine that shares a GPU, through steps in the project's order and in wrong ones.

    python -m tests.integration.sleep_probe FOLDER SAMPLER_TP

One worker. The engine's memory forgets while it sleeps (``poisoned_sleep``). Prints a line of JSON for every case: what
vLLM says afterwards, beside ``transformers`` with the weights that it should have.
"""

import json
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock


def main(folder: Path) -> None:
    from gtpo_megatron.rollout.engine_arguments import CPU_ENVIRONMENT, ENVIRONMENT

    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)
    import torch
    from transformers import AutoModelForCausalLM

    from gtpo_megatron.config.rollout import RolloutConfig
    from gtpo_megatron.rollout.vllm_engine import VllmEngine
    from gtpo_megatron.weights.config_json import read_architecture
    from tests.integration import poisoned_sleep
    from tests.integration.push_probe import Link, judge, layout_of, perturb

    arch = read_architecture(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = VllmEngine(str(folder), RolloutConfig(dtype="float32", kv_cache_mib=64), max_sequence_tokens=128, seed=0)
    engine._llm.collective_rpc(poisoned_sleep.install)
    prompts = torch.randint(3, arch.vocab_size, (8, 40), generator=torch.Generator().manual_seed(5))
    link = Link(engine, arch, layout_of(arch, 1, {"tp": 2}), "shared_memory")
    versions, generator = iter(range(1, 100)), torch.Generator().manual_seed(6)

    sharing = memory_sharing(engine)

    def push(pool: ThreadPoolExecutor) -> None:
        perturb(reference, generator)
        sent, received = link.push(reference, pool, next(versions))
        assert sent == received

    def tell(case: str) -> None:
        (report,) = engine._llm.collective_rpc(poisoned_sleep.report)
        print(json.dumps({"case": case} | report | judge(engine, reference, prompts, 8)), flush=True)

    with ThreadPoolExecutor(4) as pool:
        for case in ("first step", "second step"):
            sharing.to_trainer()
            sharing.to_push()
            push(pool)
            sharing.to_engine()
            tell(case)
        sharing.to_trainer(keep_weights=True)
        sharing.to_push()
        sharing.to_engine()
        tell("weights kept, none pushed")
        sharing.to_trainer()
        sharing.to_push()
        sharing.to_engine()
        tell("none pushed")
        sharing.to_trainer()
        push(pool)
        sharing.to_push()
        sharing.to_engine()
        tell("pushed into sleeping memory")


def memory_sharing(engine):
    """What takes turns with a trainer for the engine's memory; it sleeps though there is no GPU to share."""
    from gtpo_megatron.observability.timers import StageTimers
    from gtpo_megatron.orchestration.stages.stages import MemorySharing

    def sleep(*, keep_weights: bool) -> None:
        with mock.patch.object(engine, "_on_gpu", True):  # else it declines
            engine.sleep(keep_weights=keep_weights)

    return MemorySharing(
        types.SimpleNamespace(run_on_all=lambda _stage, _function: []),
        types.SimpleNamespace(sleep=sleep, wake=engine.wake),
        is_colocated=True,
        timers=StageTimers(),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
