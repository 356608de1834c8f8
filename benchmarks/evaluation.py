"""Where the time of an evaluation goes: the tiny model on the arithmetic task, on a real vLLM engine.

    python -m benchmarks.evaluation --json evaluation.json

``generation_frac`` is the share of waiting for the sampler in all time after the model is loaded; grading runs in
processes of its own while responses are being written, and counts only where the sampler has nothing left to do.
``grading_afterwards_s`` is what grading would take by itself: every response once more, in one batch.
"""

import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from gtpo_megatron.companions.evaluate.evaluated_model import EvaluatedModel
from gtpo_megatron.companions.evaluate.evaluation_run import evaluate_model
from gtpo_megatron.companions.evaluate.verdict_file import VERDICTS_FILE
from gtpo_megatron.config.evaluate import EngineConfig, EvaluateConfig
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool
from recipes.tiny_cpu import ASSETS


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much.

    Attributes:
        problems: of the held-out arithmetic set.
        samples: responses a problem.
        num_workers: grading processes.
        json: file to write; empty: standard output only.
    """

    problems: int = 256
    samples: int = 8
    num_workers: int = 2
    json: str = ""


def measure(options: Options, output: Path) -> dict[str, Any]:
    """Runs an evaluation and reads its own account of the time."""
    config = EvaluateConfig(
        benchmarks=(f"arithmetic={ASSETS / 'arithmetic' / 'heldout.jsonl'}",),
        samples=options.samples,
        num_problems=options.problems,
        max_prompt_tokens=96,
        sampling=SamplingConfig(max_response_tokens=128),
        engine=EngineConfig(dtype="float32", kv_cache_mib=256),
        reward=RewardConfig(num_workers=options.num_workers),
    )
    start = time.perf_counter()
    model = EvaluatedModel(folder=ASSETS / "tiny_qwen2", named="tiny_qwen2")
    evaluate_model(model, config, output=output, console=Console(stderr=True))
    seconds = time.perf_counter() - start
    content = json.loads((output / "evaluation.json").read_text(encoding="utf-8"))
    timing, entry = content["timing"], content["benchmarks"]["arithmetic"]
    num_responses = options.problems * options.samples
    afterwards = grading_seconds(options, output / VERDICTS_FILE)
    return {
        "generation_frac": round(timing["generation_frac"], 4),
        "seconds": {name: round(value, 3) for name, value in timing.items() if name.endswith("_s")},
        "grading_afterwards_s": round(afterwards, 3),
        "whole_command_s": round(seconds, 1),
        "responses": num_responses,
        "tokens_per_s": round(num_responses * entry["response_tokens_mean"] / timing["generation_s"]),
    }


def grading_seconds(options: Options, verdicts: Path) -> float:
    """Grades every response once more."""
    records = [json.loads(line) for line in verdicts.read_bytes().splitlines()]
    rows = [(record["response"], record["reference"]) for record in records if "response" in record]
    function = "gtpo_megatron.rewards.math_answer:math_answer"
    with RewardPool(RewardConfig(function=function, num_workers=options.num_workers, timeout_s=10.0)) as pool:
        start = time.perf_counter()
        pool.grade([RewardRequest(response=text, answer=answer) for text, answer in rows])
        return time.perf_counter() - start


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "options": asdict(options),
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "load_average": os.getloadavg()[0],
            **measure(options, Path(folder) / "out"),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
