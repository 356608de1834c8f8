"""The peer of ``benchmarks.peer_step``: GRPO of TRL with vLLM in its process, on a CPU.

``python -m benchmarks.peer_worker TASK``, a JSON object, prints one line of JSON. TRL is written for GPUs; three things
are replaced so that it runs without one, and none of them makes it slower:

- its push calls ``model.load_weights``, which on a CPU does not reach the weights that vLLM has packed for its kernels;
  here vLLM's own ``reload_weights`` takes them;
- the key-value cache has a size of its own in place of a share of a GPU's memory;
- the engine's dtype can be given.

``onednn_hidden_size`` other than 0 makes it faster: its products are computed as ours of a model of that size.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from gtpo_megatron.actor.cpu_products import choose_products

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def steps(task: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of each step and of its generation and push, and sampled tokens."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    spent: dict[str, list[float]] = {"step_s": [], "rollout_s": [], "weight_sync_s": [], "tokens": []}

    def timed(name: str, call: Any) -> Any:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            spent[name].append(time.perf_counter() - start)
            return result

        return wrapper

    def push(self: Any) -> None:
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=self._iter_named_params())
        self.llm.reset_prefix_cache()

    generation = vllm_generation.VLLMGeneration
    generation.sync_weights = timed("weight_sync_s", push)
    generation.generate = timed("rollout_s", generation.generate)
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=task["engine_dtype"])

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        spent["tokens"].append(float(sum(map(len, completion_ids))))
        return [float(sum(ids) % 3 == 0) for ids in completion_ids]

    class Clock(TrainerCallback):  # type: ignore[misc]
        """From the beginning of a step to that of the next, generation and push included."""

        begin = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._mark()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self._mark()

        def _mark(self) -> None:
            now = time.perf_counter()
            if self.begin:
                spent["step_s"].append(now - self.begin)
            self.begin = now

    if task["onednn_hidden_size"]:
        choose_products(task["onednn_hidden_size"])
    lines = Path(task["prompts"]).read_text(encoding="utf-8").splitlines()
    config = GRPOConfig(
        output_dir=task["output_dir"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # ours keeps activations, too
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=task["max_prompt_tokens"] + task["response_tokens"],
        num_generations=task["group_size"],
        per_device_train_batch_size=task["responses"],
        max_completion_length=task["response_tokens"],
        max_steps=task["steps"],
        learning_rate=2e-4,
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
    return spent


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.environ.update(VLLM_ENVIRONMENT, VLLM_CPU_KVCACHE_SPACE=str(given["cache_gib"]))
    print("PEER " + json.dumps(steps(given)))
