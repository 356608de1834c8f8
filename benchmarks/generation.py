"""Generation through our engine beside bare vLLM, with the same requests in the same process.

``python -m benchmarks.generation --output generation.json`` samples a batch in turns: through ``VllmEngine.generate``,
which returns tensors, and through ``LLM.generate`` of the engine inside it, with the same prompts, seeds and log-probs.
Ratios are taken within a round; the median over rounds counts.
"""

import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.rollout.engine_arguments import engine_environment
from gtpo_megatron.rollout.requests import SampleRequest
from recipes.tiny_cpu import ASSETS

TARGET = 0.95


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        rounds: each samples the batch both ways.
        num_prompts: of the batch.
        group_size: responses a prompt.
        max_response_tokens: limit.
        entropy_source: ``rollout`` adds entropies to ours.
    """

    output: Path
    rounds: int = 7
    num_prompts: int = 32
    group_size: int = 8
    max_response_tokens: int = 128
    entropy_source: Literal["actor", "rollout"] = "actor"


def requests_of(num_prompts: int, group_size: int, model: str) -> list[SampleRequest]:
    """Of sums, in the model's template."""
    tokenizer = load_tokenizer(model)
    lines = (ASSETS / "arithmetic" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:num_prompts]
    prompts = [
        tuple(tokenizer.apply_chat_template(json.loads(line)["prompt"], add_generation_prompt=True)["input_ids"])
        for line in lines
    ]
    return [
        SampleRequest(prompt_ids=prompt, group_id=group, sample=sample)
        for group, prompt in enumerate(prompts)
        for sample in range(group_size)
    ]


def bare(llm: Any, requests: list[SampleRequest], sampling: SamplingConfig, stop_ids: list[int]) -> int:
    """The tokens that vLLM alone samples for the same requests."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_response_tokens,
            stop_token_ids=stop_ids,
            logprobs=0,
            seed=request.seed(0),
            detokenize=False,
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
    return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))


def main() -> None:
    options = tyro.cli(Options)
    model = str(ASSETS / "tiny_qwen2")
    config = RolloutConfig(
        group_size=options.group_size, dtype="float32", kv_cache_mib=256, entropy_source=options.entropy_source
    )
    os.environ.update(engine_environment(config, has_gpus=False))
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

    requests = requests_of(options.num_prompts, options.group_size, model)
    sampling = SamplingConfig(max_response_tokens=options.max_response_tokens)
    length = max(len(request.prompt_ids) for request in requests) + options.max_response_tokens
    engine = VllmEngine(model, config, max_sequence_tokens=length, seed=0)
    rounds = []
    for number in range(-1, options.rounds):  # one round warms up
        engine.forget_prefixes()
        start = time.perf_counter()
        ours = int(engine.generate(requests, sampling, seed=0).response_lengths.sum())
        ours_s = time.perf_counter() - start
        engine.forget_prefixes()
        start = time.perf_counter()
        theirs = bare(engine._llm, requests, sampling, engine._stop_ids)
        theirs_s = time.perf_counter() - start
        if number >= 0:
            rounds.append({"ours_tokens_per_s": ours / ours_s, "bare_tokens_per_s": theirs / theirs_s})
    ratio = statistics.median(row["ours_tokens_per_s"] / row["bare_tokens_per_s"] for row in rounds)
    results = {
        "rounds": rounds,
        "ratio": ratio,
        "target": TARGET,
        "entropy_source": options.entropy_source,
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"tokens a second over bare vLLM: {ratio:.3f} (target at least {TARGET})")


if __name__ == "__main__":
    main()
