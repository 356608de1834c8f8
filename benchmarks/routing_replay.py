"""What routing replay is worth and what it costs: gaps of log-probs, bytes and seconds.

    python -m benchmarks.routing_replay --output routing_replay.json

A real vLLM engine samples from a mixture of experts in bfloat16 and returns the experts that its routers chose; a real
Megatron actor of one rank scores the same responses and makes two updates, with each ``update.routing_replay``. The
weights are equal, so whatever the log-probs differ by is rounding, and experts that rounding changed. Models:

- ``tiny``: the repository's ``tiny_qwen3_moe``, which was trained: 8 experts of 4 layers, 2 per token;
- ``random``: 16 experts of 2 layers, 4 per token, whose router tells experts hardly apart;
- ``large``: the same with 32 experts of 8 layers, 26 million parameters.

``score`` (R2) replays the scoring pass's choices in updates, so its gap to the sampler is that of ``none``; what it
changes is how far a step's second update is from the scoring pass, ``update_kl_nats``.

Every part is a process of its own with one thread, timed on its CPU, so that neighbours on the machine do not count.
Seconds of capture are what the engine needs more with ``rollout.returns_routing``, the lost prefix cache included, and
what the capturing functions take of them. Transfer is measured as in ``benchmarks.rollout_fetch``: responses by group,
pickled. Seconds of replay are what tells the routers, notes their choices and gathers them, beside the whole passes.
"""

import dataclasses
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from gtpo_megatron.batch import RewardBatch, RolloutBatch, RolloutShard
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.orchestration.stages.rollouts import split_by_group
from gtpo_megatron.rollout.engine_arguments import CPU_ENVIRONMENT, engine_environment
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.weights.config_json import read_architecture
from recipes import tiny_cpu

ROOT = Path(__file__).resolve().parent.parent
Source = Literal["none", "score", "rollout"]
Dtype = Literal["bfloat16", "float32"]
SOURCES: tuple[Source, ...] = ("none", "score", "rollout")
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
RANDOM: dict[str, dict[str, Any]] = {
    "random": {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 16, "num_experts_per_tok": 4},
    "large": {"hidden_size": 256, "num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4},
}
ROUTER_STD = 0.06
"""Of the random models' routers: little enough that rounding changes choices."""
TARGETS = {"mean": 2.0, "max": 8.0}
"""By how much the sampler's routing makes the gap smaller."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        models: to measure.
        num_prompts: of a batch.
        group_size: responses per prompt.
        max_response_tokens: limit.
        rounds: of every timed thing, after one that is thrown away.
    """

    output: Path
    models: tuple[Literal["tiny", "random", "large"], ...] = ("tiny", "random", "large")
    num_prompts: int = 16
    group_size: int = 8
    max_response_tokens: int = 96
    rounds: int = 3


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one process does.

    Attributes:
        kind: ``sample``: an engine; ``train``: a rank.
        folder: of the model and of the responses.
        options: of the benchmark.
        returns_routing: of the engine.
        source: ``update.routing_replay`` of the rank.
        dtype: of the rank.
    """

    kind: Literal["sample", "train"]
    folder: str
    options: Options
    returns_routing: bool = True
    source: Source = "none"
    dtype: Dtype = "bfloat16"


class Clock:
    """Adds up the CPU seconds that functions take, those of the process."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, owner: type, *names: str) -> None:
        """From now on methods of a class are timed."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed

    def take(self) -> float:
        """The seconds since the last time."""
        found, self.seconds = self.seconds, 0.0
        return found


# ------------------------------------------------------------------------------------------------------------- models
def make_model(name: str, folder: Path) -> None:
    """The model's folder, with the tokenizer of the repository's models."""
    if name == "tiny":
        shutil.copytree(tiny_cpu.ASSETS / "tiny_qwen3_moe", folder)
        return
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder.mkdir()
    tokenizer = tiny_cpu.ASSETS / "tiny_qwen2"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=read_architecture(tokenizer).vocab_size,
        moe_intermediate_size=128 if name == "large" else 32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        norm_topk_prob=True,
        initializer_range=0.1,
        tie_word_embeddings=False,
        **RANDOM[name],
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for weight_name, parameter in model.named_parameters():
            if "norm" in weight_name:
                parameter.uniform_(0.5, 1.5)
            if weight_name.endswith("mlp.gate.weight"):
                parameter.normal_(std=ROUTER_STD)
    # both sides begin with the same numbers
    model.to(torch.bfloat16).save_pretrained(folder)
    for file_name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file_name, folder)


# ------------------------------------------------------------------------------------------------------------ sampling
def requests_of(options: Options, model: str) -> list[SampleRequest]:
    """Prompts of the arithmetic task."""
    tokenizer = load_tokenizer(model)
    lines = (tiny_cpu.ASSETS / "arithmetic" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        SampleRequest(
            prompt_ids=tuple(
                tokenizer.apply_chat_template(json.loads(line)["prompt"], add_generation_prompt=True)["input_ids"]
            ),
            group_id=group,
            sample=sample,
        )
        for group, line in enumerate(lines[: options.num_prompts])
        for sample in range(options.group_size)
    ]


def sample(part: Part) -> dict[str, Any]:
    """Samples the batch again and again; leaves it in the folder."""
    config = RolloutConfig(
        group_size=part.options.group_size,
        dtype="bfloat16",
        kv_cache_mib=256,
        returns_routing=part.returns_routing,
    )
    os.environ.update(engine_environment(config, has_gpus=False))
    from gtpo_megatron.rollout.routing_capture import RoutingCapture
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

    clock = Clock()
    clock.around(RoutingCapture, "_capture", "take")
    requests = requests_of(part.options, part.folder)
    sampling = SamplingConfig(max_response_tokens=part.options.max_response_tokens)
    length = max(len(request.prompt_ids) for request in requests) + part.options.max_response_tokens
    engine = VllmEngine(part.folder, config, max_sequence_tokens=length, seed=0, num_threads=1)
    rounds = []
    for number in range(part.options.rounds + 1):
        engine.forget_prefixes()
        clock.take()
        start = time.process_time()
        batch = engine.generate(requests, sampling, seed=0)
        if number:
            rounds.append({"generate_s": time.process_time() - start, "capturing_s": clock.take()})
    found = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    if part.returns_routing:
        torch.save(batch, Path(part.folder) / "batch.pt")
        found |= transfer(batch, part.options.rounds)
    engine.close()
    return found


def transfer(batch: RolloutBatch, num_rounds: int) -> dict[str, Any]:
    """Bytes of the routing, and what they add to a batch that is put by group, pickled and read again."""
    routed = batch.routed_experts
    assert routed is not None

    def seconds(one: RolloutBatch) -> tuple[float, int]:
        start = time.process_time()
        pieces = [pickle.dumps(piece, protocol=5) for piece in split_by_group(one).values()]
        for piece in pieces:
            pickle.loads(piece)
        return time.process_time() - start, sum(len(piece) for piece in pieces)

    without = dataclasses.replace(batch, routed_experts=None)
    pairs = [(seconds(batch), seconds(without)) for _ in range(num_rounds + 1)][1:]
    return {
        "responses": batch.num_responses,
        "response_tokens": int(batch.response_lengths.sum()),
        "routed_tokens": len(routed),
        "routing_bytes_per_token": routed[0].numel() * routed.element_size(),
        "routing_bytes_per_step": routed.numel() * routed.element_size(),
        "batch_bytes_without_routing": pairs[0][1][1],
        "transfer_s": statistics.median(one[0] for one, _ in pairs),
        "transfer_without_routing_s": statistics.median(other[0] for _, other in pairs),
    }


# ------------------------------------------------------------------------------------------------------------ training
def rank_config(part: Part) -> RunConfig:
    """One rank, two updates per step, the recipe's learning rate."""
    base = tiny_cpu.gtpo()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, path=part.folder, dtype=part.dtype, max_sequence_tokens=512),
        parallel=ParallelConfig(num_ranks=1),
        optimizer=dataclasses.replace(base.optimizer, warmup_updates=0),
        rollout=dataclasses.replace(base.rollout, dtype="bfloat16", returns_routing=True),
        update=dataclasses.replace(
            base.update, routing_replay=part.source, updates_per_rollout=2, micro_batch_tokens=4096
        ),
    )


def train(part: Part) -> dict[str, Any]:
    """Scores and updates again and again; gaps are of the first round, whose weights are the sampler's."""
    os.environ.update(CPU_ENVIRONMENT)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of every optional kernel it lacks
        from gtpo_megatron.actor.actor import MegatronActor
        from gtpo_megatron.actor.experts.routing_replay import RoutingReplay

        with tempfile.TemporaryDirectory() as folder:
            actor = MegatronActor(rank_config(part), global_rank=0, init_method=f"file://{folder}/store")
    clock = Clock()
    clock.around(RoutingReplay, "begin_scoring", "end_scoring", "begin_update", "end_update")
    batch = torch.load(Path(part.folder) / "batch.pt", weights_only=False)  # ours, of a moment ago
    correct = torch.rand(batch.num_responses, generator=torch.Generator().manual_seed(1)) < 0.5
    rewards = RewardBatch(rewards=correct.float(), failed=torch.zeros_like(correct))
    rounds, first = [], {}
    for number in range(part.options.rounds + 1):
        clock.take()
        start = time.process_time()
        metrics = to_scalars(actor.score_tokens(RolloutShard.of(batch, range(batch.num_responses))))
        times = {"score_s": time.process_time() - start, "replay_in_score_s": clock.take()}
        scores = actor.batch
        assert scores is not None
        gap = (scores.old_logprobs - batch.rollout_logprobs)[batch.loss_mask].double()
        actor.credit_tokens(rewards)
        start = time.process_time()
        metrics |= to_scalars(actor.update(0))  # not a newer policy: the same responses are scored again
        times |= {"updates_s": time.process_time() - start, "replay_in_updates_s": clock.take()}
        if number:
            rounds.append(times)
        else:
            first = {
                "gap_mean_nats": float(gap.abs().mean()),
                "gap_max_nats": float(gap.abs().max()),
                "gap_k3_nats": float((gap.exp() - 1 - gap).mean()),
                "update_kl_nats": metrics["policy/kl_old_nats"],
                "routing_mismatch_frac": metrics.get("experts/routing_mismatch_frac"),
            }
    actor.close()
    return first | {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


# ----------------------------------------------------------------------------------------------------------- the whole
def in_a_process_of_its_own(part: Part, scratch: Path) -> dict[str, Any]:
    """What the part found."""
    told, answer = scratch / "part.pickle", scratch / "answer.json"
    told.write_bytes(pickle.dumps(part))
    command = [sys.executable, "-m", "benchmarks.routing_replay", "--part", str(told), str(answer)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{part}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def measure(name: str, options: Options, scratch: Path) -> dict[str, Any]:
    """Everything of one model."""
    folder = scratch / name
    make_model(name, folder)
    part = Part(kind="sample", folder=str(folder), options=options)
    captured = in_a_process_of_its_own(part, scratch)
    plain = in_a_process_of_its_own(dataclasses.replace(part, returns_routing=False), scratch)
    result: dict[str, Any] = {"sampling": captured | {"generate_without_routing_s": plain["generate_s"]}}
    for dtype in DTYPES:
        trained = {
            source: in_a_process_of_its_own(
                Part(kind="train", folder=str(folder), options=options, source=source, dtype=dtype), scratch
            )
            for source in SOURCES
        }
        off, replayed = trained["none"], trained["rollout"]
        ratios = {kind: off[f"gap_{kind}_nats"] / replayed[f"gap_{kind}_nats"] for kind in ("mean", "max", "k3")}
        result[f"trainer_{dtype}"] = trained | {"none_over_rollout": ratios}
        print_rows(name, dtype, trained, ratios)
    print(
        f"{name}: {captured['routing_bytes_per_token']} bytes per token, {captured['routing_bytes_per_step']:,} per "
        f"step; generation {plain['generate_s']:.2f} s, with routing {captured['generate_s']:.2f} s, of which "
        f"capturing {captured['capturing_s']:.2f} s; transfer {captured['transfer_s'] * 1e3:.1f} ms, without routing "
        f"{captured['transfer_without_routing_s'] * 1e3:.1f} ms"
    )
    return result


def print_rows(name: str, dtype: str, trained: dict[str, dict[str, Any]], ratios: dict[str, float]) -> None:
    for source, row in trained.items():
        print(
            f"{name:7} trainer {dtype:9} {source:8} gap mean {row['gap_mean_nats']:.2e} max {row['gap_max_nats']:.2e} "
            f"k3 {row['gap_k3_nats']:.1e}  second update {row['update_kl_nats']:.1e}  score {row['score_s']:.2f} s "
            f"(replay {row['replay_in_score_s']:.3f})  two updates {row['updates_s']:.2f} s (replay "
            f"{row['replay_in_updates_s']:.3f})"
        )
    targets = ", ".join(f"{kind} {ratios[kind]:.1f} (target {target})" for kind, target in TARGETS.items())
    print(f"{name:7} trainer {dtype:9} none over rollout: {targets}, k3 {ratios['k3']:.1f}")


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--part"]:
        part: Part = pickle.loads(Path(arguments[1]).read_bytes())
        found = sample(part) if part.kind == "sample" else train(part)
        Path(arguments[2]).write_text(json.dumps(found))
        return
    options = tyro.cli(Options, description=__doc__, args=arguments)
    with tempfile.TemporaryDirectory() as scratch:
        models = {name: measure(name, options, Path(scratch)) for name in options.models}
    result = {
        "options": {name: value for name, value in asdict(options).items() if name != "output"},
        "targets_none_over_rollout": TARGETS,
        "models": models,
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
