"""A small world in which every command works: a model, data, a run, an evaluation, a study; made once a session."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from gtpo_megatron.companions.evaluate import evaluation_run
from gtpo_megatron.companions.evaluate.verdict_file import GradedResponse
from gtpo_megatron.companions.planner.correction import PlanCorrection, write_correction
from gtpo_megatron.companions.study.plan import planned_runs
from gtpo_megatron.companions.study.runs_file import append_run
from gtpo_megatron.config.output import CheckpointConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.orchestration.loop.inputs import read_inputs
from gtpo_megatron.run_folder import state as run_state
from gtpo_megatron.run_folder.checkpoints import DriverState
from gtpo_megatron.run_folder.folder import RunFolder
from gtpo_megatron.run_folder.manifest import run_facts
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.conversion import ConversionProgress, hf_to_megatron
from gtpo_megatron.weights.megatron.checkpoint_files import file_checksum
from gtpo_megatron.weights.reshard import hf_shapes
from recipes.tiny_cpu import ASSETS, gtpo
from tests.unit.companions.study.makers import STUDY, summaries

STEPS = 3
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SMALL = {
    "hidden_size": 32,
    "head_dim": 32,  # vLLM's attention on CPUs has none below
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
}


def make_world(root: Path) -> None:
    """Fills a folder; commands are called with it as the current one, so that the files name no absolute path."""
    _data(root / "data")
    _model(root / "model")
    hf_to_megatron(root / "model", root / "converted", ParallelConfig(num_ranks=1), progress=ConversionProgress())
    with here(root):
        _run(Path("run"))
        _study(Path("study"), Path("of_study"))
        _evaluation()
        _preflight(Path("preflight"))


@contextmanager
def here(folder: Path) -> Iterator[None]:
    """The current folder, for a while."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _data(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, first in (("train", 1), ("heldout", 50)):
        rows = [
            {"prompt": f"What is {a} + 3?", "answer": str(a + 3), "id": f"{name}-{a}"} for a in range(first, first + 8)
        ]
        rows[1]["prompt"] = [{"role": "user", "content": rows[1]["prompt"]}]
        rows[2]["answer"] = first + 5
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / f"{name}.json").write_text(json.dumps({"data": rows}), encoding="utf-8")


def _model(folder: Path) -> None:
    shutil.copytree(ASSETS / "tiny_qwen2", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | SMALL
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    shapes = hf_shapes(read_architecture(folder))
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    names = sorted(tensors)
    parts = dict(zip(SHARDS, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True))
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def config_of_run():
    """Of the world's run, for the current folder."""
    config = gtpo(num_steps=STEPS + 2)
    return replace(
        config,
        model=replace(config.model, path="model"),
        data=replace(config.data, train_path="data/train.jsonl", prompts_per_step=4),
        evaluation=replace(config.evaluation, path="data/heldout.jsonl", num_problems=0),
        parallel=ParallelConfig(num_ranks=1),
        logging=replace(config.logging, tensorboard=False),
    )


def _run(folder: Path) -> None:
    config = config_of_run()
    inputs = read_inputs(config, load_tokenizer(config.model.path))
    run = RunFolder(folder)
    run.open(config, resume=False)
    run.record_run(config, inputs.contents, goes_on=False)
    sampler = PromptSampler(inputs.train, config.seed)
    scratch = run.checkpoints.begin(STEPS)
    shutil.copytree("converted/megatron", scratch, dirs_exist_ok=True)
    (scratch / "unmeasured.json").write_text(json.dumps({"rollout/reward_mean": 0.5, "step": STEPS}), encoding="utf-8")
    shards = sorted(scratch.glob("*.distcp"))
    run.checkpoints.finish(
        scratch,
        DriverState(step=STEPS, sampler=sampler.state_dict(), counters={"responses": 96}, mismatch={"samples": []}),
        run=run_facts(config, read_architecture(Path(config.model.path))),
        checksums={shard.name: file_checksum(shard) for shard in shards},
        scores={"eval/heldout_mean_at_k": 0.25},
        config=CheckpointConfig(),
    )
    rows = [
        {"step": step, "timing/step_s": 2.5, "rollout/reward_mean": 0.5, "policy/entropy_nats": 1.25}
        | ({"eval/heldout_mean_at_k": 0.1 * step} if step in (0, STEPS) else {})
        for step in range(STEPS + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "rollouts").mkdir()
    record = {
        "step": 1, "group_id": 0, "policy_version": 0, "prompt": "1 + 1?", "response": "2!", "tokens": ["2", "!"],
        "token_entropy": [0.5, 0.25], "shaped_rewards": [1.0, 1.0], "advantages": [0.5, -0.5], "reward": 1.0,
        "truncated": False, "reward_failed": False, "answer": "2",
    }  # fmt: skip
    lines = [record | {"reward": float(number % 2)} for number in range(4)]
    (folder / "rollouts" / "step_000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_state.record_end(folder, "stopped after step 3: SIGTERM")
    run.close()
    (folder / "log.txt").write_text("2026-01-01 10:00:00,000 ERROR   something went wrong\n", encoding="utf-8")


def _preflight(folder: Path) -> None:
    folder.mkdir()
    found = {"generate": 3 << 30, "train": 2 << 30}
    correction = PlanCorrection(recipe="r", layout="TP1", gpu="H100", planned_bytes=found, measured_bytes=found)
    write_correction(folder / "plan_correction.json", correction)


def _study(folder: Path, runs: Path) -> None:
    planned = planned_runs(STUDY, ["gtpo", "grpo"], num_seeds=2, num_steps=2)
    for summary in summaries(planned, runs):
        append_run(folder, summary)
    shutil.rmtree(runs)


def _evaluation() -> None:
    from gtpo_megatron.cli import dispatch

    def measure(model, config, file, wanted, *_) -> None:
        for one in wanted:
            response = GradedResponse(
                benchmark=one.benchmark, problem_id=one.problem.problem_id, sample=one.sample, seed=one.sample,
                reference=one.problem.answer, reward=float(one.sample % 2), failure=None, is_truncated=False,
                num_tokens=3, answer="2", response="so 2 \ud83d",
            )  # fmt: skip
            file.append(response)

    with mock.patch.object(evaluation_run, "_measure", measure):
        assert dispatch.run(EVALUATE) == 0


EVALUATE = [
    *("evaluate", "model", "--benchmarks", "mine=data/heldout.jsonl", "--samples", "2", "--output", "evaluated"),
    *("--sampling.max-response-tokens", "64", "--max-prompt-tokens", "64", "--reward.num-workers", "1"),
]
