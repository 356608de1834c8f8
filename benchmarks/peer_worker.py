"""The peer of ``benchmarks.peer_step``: GRPO of TRL with vLLM in its process.

``python -m benchmarks.peer_worker TASK``, a JSON object, prints a line of JSON. What is replaced makes nothing slower:

- the engine's dtype can be given, and its key-value cache has a size of its own, that of ours, in place of a share of
  a GPU's memory;
- on a CPU TRL's push calls ``model.load_weights``, which does not reach the weights that vLLM has packed for its
  kernels; there vLLM's own ``reload_weights`` takes them. On a GPU the push is TRL's.

TRL 1.16 says that it supports vLLM 0.22 to 0.31 and warns of another version; nothing of it refuses 0.32.
``onednn_hidden_size`` other than 0 makes it faster: its products are computed as ours of a model of that size.
"""

import functools
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from gtpo_megatron.kernels.cpu_products import choose_products

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Stopwatch:
    """Seconds by stage and step; a GPU has done its work before a stage ends.

    Attributes:
        steps: a value of each figure for every step that is over.
    """

    def __init__(self, device: str) -> None:
        self.steps: dict[str, list[float]] = defaultdict(list)
        self._now: dict[str, float] = {}
        self._device = device
        self._begin = 0.0

    def _time(self) -> float:
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def add(self, name: str, value: float) -> None:
        """To a figure of this step."""
        self._now[name] = self._now.get(name, 0.0) + value

    def timed(self, name: str, call: Any) -> Any:
        """The function, whose seconds are added to a stage."""

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = self._time()
            result = call(*args, **kwargs)
            self.add(name, self._time() - start)
            return result

        return wrapper

    def mark(self) -> None:
        """A step is over, if one had begun, and the next begins."""
        now = self._time()
        if self._begin:
            self._now["step_s"] = now - self._begin
            # TRL prepares a batch by sampling, grading and scoring it; the rest of a step is the update
            self._now["update_s"] = self._now["step_s"] - self._now.pop("prepare_s")
            for name in ("rollout_s", "weight_sync_s", "score_s", "update_s", "step_s", "tokens"):
                self.steps[name].append(self._now.get(name, 0.0))
        self._now.clear()
        self._begin = now


def _replace(task: dict[str, Any], watch: Stopwatch) -> None:
    """Puts the stopwatch into TRL, and what the head of this file says."""
    import torch
    from trl import GRPOTrainer
    from trl.generation import vllm_generation

    def push(self: Any) -> None:
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=self._iter_named_params())
        self.llm.reset_prefix_cache()

    generation = vllm_generation.VLLMGeneration
    is_gpu = task["device"] == "cuda"
    generation.sync_weights = watch.timed("weight_sync_s", generation.sync_weights if is_gpu else push)
    generation.generate = watch.timed("rollout_s", generation.generate)
    cache = {"kv_cache_memory_bytes": task["cache_mib"] << 20} if is_gpu else {}
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=task["engine_dtype"], **cache)
    score = GRPOTrainer._get_per_token_logps_and_entropies
    timed_score = watch.timed("score_s", score)

    @functools.wraps(score)
    def scored_or_trained(*args: Any, **kwargs: Any) -> Any:
        return score(*args, **kwargs) if torch.is_grad_enabled() else timed_score(*args, **kwargs)

    GRPOTrainer._get_per_token_logps_and_entropies = scored_or_trained
    GRPOTrainer._prepare_inputs = watch.timed("prepare_s", GRPOTrainer._prepare_inputs)


def steps(task: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of each step, of its generation, push, scoring and update, and sampled tokens."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    watch, is_gpu = Stopwatch(task["device"]), task["device"] == "cuda"
    _replace(task, watch)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        watch.add("tokens", float(sum(map(len, completion_ids))))
        return [float(sum(ids) % 3 == 0) for ids in completion_ids]

    class Clock(TrainerCallback):  # type: ignore[misc]
        """From the beginning of a step to that of the next, generation and push included."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.mark()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            watch.mark()

    if task["onednn_hidden_size"]:
        choose_products(task["onednn_hidden_size"])
    lines = Path(task["prompts"]).read_text(encoding="utf-8").splitlines()
    config = GRPOConfig(
        output_dir=task["output_dir"],
        model_init_kwargs={"dtype": task["trainer_dtype"]},
        use_cpu=not is_gpu,
        bf16=task["products_in_bfloat16"],
        gradient_checkpointing=False,  # ours keeps activations, too
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=task["max_prompt_tokens"] + task["response_tokens"],
        vllm_enable_sleep_mode=task["sleeps"],
        num_generations=task["group_size"],
        per_device_train_batch_size=task["batch"],
        gradient_accumulation_steps=task["responses"] // task["batch"],
        max_completion_length=task["response_tokens"],
        max_steps=task["steps"],
        learning_rate=1e-6 if is_gpu else 2e-4,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    GRPOTrainer(
        model=task["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines]),
        callbacks=[Clock()],
    ).train()
    return dict(watch.steps)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.environ.update(VLLM_ENVIRONMENT)
    if given["device"] == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, given["cache_mib"] >> 10))
    print("PEER " + json.dumps(steps(given)), flush=True)
    os._exit(0)  # an engine's threads must not keep the process
