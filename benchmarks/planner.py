"""How long a plan takes, and estimated steps beside published and measured ones.

    python -m benchmarks.planner --json planner.json

Seconds are of this process on one core. Published: NeMo-RL's GRPO on H100, bfloat16. For dense models the tokens of a
step follow from its seconds and its tokens per second, and 64 prompts of 32 responses are assumed. For mixtures of
experts mean length, responses and updates of a step are published too (NeMo-RL 0.6); its 94 layers in 8 stages are not
equal stages, and are estimated as if they were. Each step is estimated twice: as ``gtpo-megatron plan`` does, and by
the simulation behind ``plan --nodes``, with lognormal lengths of the same mean. Of the run that samples one step ahead
tokens per second are published; that half of its GPUs generate is assumed, and its layout is that of NeMo-RL 0.4's.

Measured: what one H100 and one H200 took to score and to update (``benchmarks/results/gpu_proof_*.json``, Megatron's
local layers), beside the planner's seconds of the same model and batch. The planner's shares of the peak are from three
of these models, so these agree by construction; the others show how far the rule holds.
"""

import json
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import tyro

from benchmarks.gpu_proof.models import run_config
from benchmarks.gpu_proof.page import values_of
from benchmarks.gpu_proof.sizes import ModelSize, sizes_of
from gtpo_megatron.companions.goodput.scale import IN_TURN, simulation_of
from gtpo_megatron.companions.goodput.simulation import Mode
from gtpo_megatron.companions.planner.hardware import GIB, GPUS, gpu_of_device
from gtpo_megatron.companions.planner.known_models import KNOWN_MODELS
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.layout_plan import make_plan
from gtpo_megatron.companions.planner.model_request import paper_setting
from gtpo_megatron.companions.planner.request import Cluster, PlanRequest, request_from
from gtpo_megatron.companions.planner.search import assess
from gtpo_megatron.companions.planner.step_time import StepTime
from gtpo_megatron.config.parallel import ParallelConfig
from recipes.qwen2_5_32b import gtpo_64gpu

PROMPT_TOKENS = 200
GPUS_PER_NODE = 8

MEASURED = tuple(Path(__file__).parent / "results" / f"gpu_proof_{name}.json" for name in ("h100", "h200"))
"""Reports of ``benchmarks.gpu_proof``."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A step that somebody else has measured.

    Attributes:
        mean_tokens: of a prompt with its response; 0: not published, follows from the tokens per second.
        rollout_gpus: of ``gpus``, that only generate; 0: all do both in turns.
    """

    model: str
    gpus: int
    layout: Layout
    engine_tensor: int
    seconds: float
    tokens_per_second_and_gpu: float
    mean_tokens: float = 0.0
    sequence_tokens: int = 4096
    responses: int = 64 * 32
    update_responses: int = 512
    rollout_gpus: int = 0

    @property
    def name(self) -> str:
        """With what tells it from another run of the model."""
        return self.model + (", one step ahead" if self.rollout_gpus else "")


PUBLISHED = (
    Published(
        model="Qwen/Qwen3-32B",
        gpus=32,
        layout=Layout(num_ranks=32, tensor=4, pipeline=4, sequence_parallel=True),
        engine_tensor=4,
        seconds=376,
        tokens_per_second_and_gpu=571,
    ),
    Published(
        model="meta-llama/Llama-3.1-8B",
        gpus=16,
        layout=Layout(num_ranks=16, tensor=1),
        engine_tensor=1,
        seconds=92.8,
        tokens_per_second_and_gpu=1581,
    ),
    Published(
        model="Qwen/Qwen3-30B-A3B",
        gpus=32,
        layout=Layout(num_ranks=32, expert=8),
        engine_tensor=2,
        seconds=192,
        tokens_per_second_and_gpu=1102,
        mean_tokens=3203,
    ),
    Published(
        model="Qwen/Qwen3-235B-A22B",
        gpus=128,
        layout=Layout(
            num_ranks=128, tensor=2, pipeline=8, context=2, expert=16, sequence_parallel=True, recompute="full"
        ),
        engine_tensor=16,
        seconds=395,
        tokens_per_second_and_gpu=58.9,
        mean_tokens=5698,
        sequence_tokens=8192,
        responses=512,
    ),
    Published(
        model="Qwen/Qwen3-30B-A3B",
        gpus=32,
        layout=Layout(num_ranks=16, pipeline=2, expert=8),
        engine_tensor=2,
        seconds=2048 * 3203 / 1414 / 32,
        tokens_per_second_and_gpu=1414,
        mean_tokens=3203,
        rollout_gpus=16,
    ),
)

GROUP_SIZE = 32
"""Responses of a prompt."""

ONE_STEP_AHEAD = Mode(max_staleness=1, is_stepwise=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run.

    Attributes:
        gpus: that are planned for.
        rounds: repetitions of each plan.
        json: file to write; empty: standard output only.
    """

    gpus: int = 64
    rounds: int = 5
    json: str = ""


def request_for(model: str, gpus: int, engine_tensor: int = 4, rollout_gpus: int = 0) -> PlanRequest:
    config = gtpo_64gpu()
    config = replace(
        config,
        parallel=ParallelConfig(num_ranks=1024),  # none that is asked for: the recipe's layout is not every model's
        model=replace(config.model, path=model),
        rollout=replace(
            config.rollout,
            num_engines=64 // engine_tensor,
            tensor_parallel_size=engine_tensor,
            nodes_per_engine=-(-engine_tensor // GPUS_PER_NODE),
            placement="disaggregated" if rollout_gpus else "colocated",
        ),
        weight_sync=replace(config.weight_sync, transport="auto"),
    )
    cluster = Cluster(gpu=GPUS["h100"], num_gpus=gpus, gpu_memory=80 * GIB, num_rollout_gpus=rollout_gpus)
    return request_from(config, cluster)


def plan_seconds(options: Options) -> dict[str, dict[str, float]]:
    """Median seconds and number of layouts of every known model."""
    rows = {}
    for model in KNOWN_MODELS:
        config = paper_setting(model, num_gpus=options.gpus, gpu_memory_gib=80, gpus_per_node=GPUS_PER_NODE)
        cluster = Cluster(gpu=GPUS["h100"], num_gpus=options.gpus, gpu_memory=80 * GIB)
        request, seconds = replace(request_from(config, cluster), own_layout=None), []
        for _ in range(options.rounds):
            start = time.perf_counter()
            plan = make_plan(request)
            seconds.append(time.perf_counter() - start)
        rows[model] = {"seconds": statistics.median(seconds), "layouts": len(plan.fitting) + len(plan.misses)}
    return rows


def estimate(row: Published) -> dict[str, float]:
    """The planner's seconds for a published step."""
    tokens = row.mean_tokens or row.tokens_per_second_and_gpu * row.gpus * row.seconds / row.responses
    request = request_for(row.model, row.gpus, row.engine_tensor, row.rollout_gpus)
    batch = replace(
        request.batch,
        num_responses=row.responses,
        num_update_responses=row.update_responses,
        num_updates=row.responses // row.update_responses,
        max_sequence_tokens=row.sequence_tokens,
        max_response_tokens=row.sequence_tokens - PROMPT_TOKENS,
        mean_prompt_tokens=PROMPT_TOKENS,
        mean_response_tokens=tokens - PROMPT_TOKENS,
    )
    request = replace(request, batch=batch)
    estimated = assess(request, row.layout).time
    both = max(estimated.generate, estimated.score + estimated.train) + estimated.push
    total = both if row.rollout_gpus else estimated.total
    result = simulation_of(request, estimated, group_size=GROUP_SIZE).run(
        ONE_STEP_AHEAD if row.rollout_gpus else IN_TURN
    )
    # of a run ahead of itself the first step waits for its responses, and nothing is sampled beside the last
    simulated = statistics.mean(result.seconds[1:-1] if row.rollout_gpus else result.seconds)
    simulated_tokens = row.responses * PROMPT_TOKENS + result.tokens / len(result.seconds)
    return {
        "published_s": row.seconds,
        "estimated_s": total,
        "ratio": row.seconds / total,
        "published_tokens_per_second_and_gpu": row.tokens_per_second_and_gpu,
        "estimated_tokens_per_second_and_gpu": row.responses * tokens / total / row.gpus,
        "simulated_s": simulated,
        "simulated_ratio": row.seconds / simulated,
        "simulated_tokens_per_second_and_gpu": simulated_tokens / simulated / row.gpus,
        **asdict(estimated),
    }


def measured_rows() -> dict[str, dict[str, float]]:
    """Seconds to score a batch and to update once, measured and estimated, by GPU and model."""
    sizes = sizes_of(torch.device("cpu"), small=False)
    known = {size.name: size for size in (*sizes.models, sizes.whole, *sizes.adapted)}
    rows = {}
    for file in MEASURED:
        parts = json.loads(file.read_text(encoding="utf-8"))
        for part in (parts[name] for name in ("training", "adapters") if name in parts):
            device = part["facts"]["device"]
            for section in dict.fromkeys(line["group"] for line in part["lines"]):
                model = section.removesuffix(": score and update")
                found = values_of(part, section)
                estimated = one_rank(known[model], device)
                update = found["forward_backward: time"] + found["optimizer: time"]
                rows[f"{device}, {model}"] = {
                    "score_s": found["score: time"],
                    "estimated_score_s": estimated.score,
                    "score_ratio": found["score: time"] / estimated.score,
                    "update_s": update,
                    "estimated_update_s": estimated.train,
                    "update_ratio": update / estimated.train,
                }
    return rows


def one_rank(size: ModelSize, device: str) -> StepTime:
    """The planner's seconds of the proof's batch on one GPU that does nothing but train."""
    gpu = gpu_of_device(device)
    assert gpu is not None, "the planner knows the GPUs that have measured"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(size.config), encoding="utf-8")
        config = run_config(Path(folder), size, "bfloat16")
        request = request_from(
            config,
            Cluster(gpu=GPUS[gpu], num_gpus=2, gpu_memory=80 * GIB, num_rollout_gpus=1),
            mean_prompt_tokens=size.prompt_tokens,
            mean_response_tokens=size.response_tokens,
        )
    return assess(request, Layout(num_ranks=1, recompute=size.recompute)).time


def main() -> None:
    """Runs the benchmark and prints three tables."""
    options = tyro.cli(Options, description=__doc__)
    result = {
        "options": asdict(options),
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "plans": plan_seconds(options),
        "steps": {row.name: estimate(row) for row in PUBLISHED},
        "measured": measured_rows(),
    }
    for model, row in result["plans"].items():
        print(f"{model:42s} {row['layouts']:5.0f} layouts for {options.gpus} GPUs: {row['seconds']:6.3f} s")
    for model, row in result["steps"].items():
        print(
            f"{model:42s} published {row['published_s']:6.1f} s a step: {row['ratio']:.2f} times the estimated "
            f"{row['estimated_s']:6.1f} s, {row['simulated_ratio']:.2f} times the simulated {row['simulated_s']:6.1f} s"
        )
    for model, row in result["measured"].items():
        print(
            f"{model:52s} scores {row['score_s']:6.3f} s, {row['score_ratio']:.2f} times the estimate; "
            f"updates {row['update_s']:6.3f} s, {row['update_ratio']:.2f} times"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
