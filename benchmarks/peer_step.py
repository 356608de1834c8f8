"""A training step beside TRL's, on two CPU cores, with one model, one set of prompts and the same vLLM.

    uv pip install -e '.[peer]' --constraint requirements/cpu-constraints.txt
    python -m benchmarks.peer_step --output peer_step.json
    python -m benchmarks.peer_step --size small --output peer_step_small.json
    python -m benchmarks.peer_step --size smollm2 --rounds 2 --steps 4 --output peer_step_smollm2.json

Runs take turns, each with processes of its own: GTPO here (Megatron ranks, a vLLM engine, Ray), once with entropies
from the trainer and once from the sampler, and GRPO with TRL, whose engine is in its process. The model has random
weights. TRL lets vLLM choose the engine's dtype, which for weights of float32 is bfloat16; ours is float32, so that
sampler and trainer agree to 5e-5 nats. TRL is therefore timed a second time with a float32 engine, and a third time
with what our trainer does to torch and a user of TRL could do as well: products by oneDNN, if
``gtpo_megatron/actor/cpu_products.py`` chooses them for a model of this size. Seconds are medians over the steps after
the first two (which compile, or fill caches) and over the rounds; both sides push
the new weights in every step. See ``benchmarks/peer_worker.py`` for what TRL needs on a CPU.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from gtpo_megatron.run_folder.metrics_file import read_metrics
from recipes.tiny_cpu import ASSETS

ROOT = Path(__file__).resolve().parent.parent
GROUP_SIZE = 8
MAX_PROMPT_TOKENS = 96
RESPONSE_TOKENS = 96
SETTLING_STEPS = 2
STAGES = ("rollout", "reward", "score", "credit", "update", "weight_sync")

SIZES: dict[str, tuple[int, dict[str, int]]] = {
    "large": (64, {"vocab_size": 16384, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5}),
    "small": (256, {"vocab_size": 339, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}),
    "smollm2": (16, {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}),
}
"""Responses of a step, and the model: 14.1, 1.1 and 134.5 million parameters."""

MICRO_BATCH_TOKENS = {"large": 8192, "small": 8192, "smollm2": 1024}
"""Of ours; TRL takes all responses of a rank at once."""

RANKS = {"large": 2, "small": 2, "smollm2": 1}
"""Data-parallel ranks on the two cores; one, as in recipes/smollm2_cpu.py, has the gradients in memory once."""

TARGETS = {"large": 0.5, "small": 0.7, "smollm2": 0.5}
"""Upper bounds of our step over TRL's with the same dtype."""

ARMS = ("ours", "ours_sampler_entropies", "trl", "trl_float32_engine", "trl_float32_engine_onednn")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        size: of model and batch.
        rounds: turns of every arm.
        steps: of a run; the first two are not counted.
        arms: to run.
    """

    output: Path
    size: Literal["large", "small", "smollm2"] = "large"
    rounds: int = 3
    steps: int = 7
    arms: tuple[str, ...] = ARMS


def make_model(folder: Path, sizes: dict[str, int]) -> float:
    """Writes a Qwen2 with random weights and the recipes' tokenizer; returns its millions of parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    heads = sizes["hidden_size"] // 64
    config = Qwen2Config(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=3 if heads % 3 == 0 else heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    for path in (ASSETS / "tiny_qwen2").iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "generation_config")):
            shutil.copy(path, folder)
    return sum(value.numel() for value in model.parameters()) / 1e6


def run(command: list[str], log: Path, **environment: str) -> None:
    """A process to its end.

    Raises:
        SystemExit: it failed.
    """
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{log.read_text(errors='replace')[-3000:]}"
        )


def ours(model: Path, scratch: Path, options: Options, *, entropy_source: str) -> dict[str, Any]:
    """A real run: DP 2, a push each step, next to no evaluation and one checkpoint at its end."""
    folder = scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    fields = {
        "num_steps": options.steps,
        "model.path": model,
        "model.max_sequence_tokens": MAX_PROMPT_TOKENS + RESPONSE_TOKENS,
        "data.prompts_per_step": SIZES[options.size][0] // GROUP_SIZE,
        "rollout.sampling.max_response_tokens": RESPONSE_TOKENS,
        "evaluation.sampling.max_response_tokens": RESPONSE_TOKENS,
        "rollout.entropy_source": entropy_source,
        "parallel.tensor_parallel_size": 1,
        "parallel.num_ranks": RANKS[options.size],
        "cluster.threads_per_rank": 2 // RANKS[options.size],
        "rollout.kv_cache_mib": 512,
        "update.micro_batch_tokens": MICRO_BATCH_TOKENS[options.size],
        "evaluation.every_steps": 0,
        "evaluation.num_problems": 1,  # measured before and after
        "evaluation.samples": 1,
        "checkpoint.every_steps": 0,
    }
    flags = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    flags.append("--checkpoint.no-export-hf")
    trainer = str(Path(sys.executable).with_name("gtpo-megatron"))
    run([trainer, "train", "recipes.tiny_cpu:gtpo", "--run-dir", str(folder), *flags], scratch / "ours.log")
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "timing/step_s" in row][SETTLING_STEPS:]
    found = {"step_s": statistics.median(row["timing/step_s"] for row in rows)}
    found |= {f"{name}_s": statistics.median(row.get(f"timing/{name}_s", 0.0) for row in rows) for name in STAGES}
    found["tokens"] = statistics.median(row["throughput/tokens_per_s"] * row["timing/step_s"] for row in rows)
    return found


def trl(
    model: Path, scratch: Path, options: Options, *, engine_dtype: str, is_like_ours: bool = False
) -> dict[str, Any]:
    """The peer's run, of as many steps."""
    sizes = {
        "max_prompt_tokens": MAX_PROMPT_TOKENS,
        "response_tokens": RESPONSE_TOKENS,
        "group_size": GROUP_SIZE,
        "responses": SIZES[options.size][0],
        "steps": options.steps,
        "cache_gib": 1,
    }
    log = scratch / "trl.log"
    task = {"model": str(model), "output_dir": str(scratch / "trl"), "engine_dtype": engine_dtype, **sizes}
    task["onednn_hidden_size"] = SIZES[options.size][1]["hidden_size"] if is_like_ours else 0
    task["prompts"] = str(ASSETS / "arithmetic" / "train.jsonl")
    run([sys.executable, "-m", "benchmarks.peer_worker", json.dumps(task)], log)
    (line,) = (line for line in log.read_text(errors="replace").splitlines() if line.startswith("PEER "))
    spent = json.loads(line.removeprefix("PEER "))
    return {name: statistics.median(values[SETTLING_STEPS:]) for name, values in spent.items()}


def main() -> None:
    """Runs the arms in turns, prints a table, writes the JSON."""
    options = tyro.cli(Options, description=__doc__)
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.arms}
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        model = scratch / "model"
        millions = make_model(model, SIZES[options.size][1])
        calls = {
            "ours": lambda: ours(model, scratch, options, entropy_source="actor"),
            "ours_sampler_entropies": lambda: ours(model, scratch, options, entropy_source="rollout"),
            "trl": lambda: trl(model, scratch, options, engine_dtype="auto"),
            "trl_float32_engine": lambda: trl(model, scratch, options, engine_dtype="float32"),
            "trl_float32_engine_onednn": lambda: trl(
                model, scratch, options, engine_dtype="float32", is_like_ours=True
            ),
        }
        for number in range(options.rounds):
            for arm in options.arms if number % 2 == 0 else options.arms[::-1]:
                begin = time.perf_counter()
                found[arm].append(calls[arm]())
                found[arm][-1]["run_s"] = time.perf_counter() - begin
                print(f"round {number}: {arm}: {found[arm][-1]['step_s']:.2f} s a step", flush=True)
    medians = {
        arm: {name: statistics.median(row[name] for row in rows) for name in rows[0]} for arm, rows in found.items()
    }
    ratios = {
        f"{arm}_over_{peer}": statistics.median(
            mine["step_s"] / theirs["step_s"] for mine, theirs in zip(found[arm], found[peer], strict=True)
        )
        for arm in options.arms
        for peer in options.arms
        if arm.startswith("ours") and peer.startswith("trl")
    }
    result = {
        "size": options.size,
        "parameters_millions": round(millions, 2),
        "responses": SIZES[options.size][0],
        "response_tokens": RESPONSE_TOKENS,
        "rounds": found,
        "medians": medians,
        "ratios": ratios,
        "target": TARGETS[options.size],
        "processor": torch.cpu.get_capabilities()["cpu_name"],
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for arm, row in medians.items():
        print(f"{arm:24} {row['step_s']:6.2f} s a step")
    for name, ratio in ratios.items():
        print(f"{name:48} {ratio:5.2f}")


if __name__ == "__main__":
    main()
