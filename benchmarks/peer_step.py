"""A training step beside TRL's, with one model, one set of prompts and the same vLLM, on two CPU cores or one GPU.

    uv pip install -e '.[peer]' --constraint requirements/cpu-constraints.txt
    python -m benchmarks.peer_step --output peer_step.json
    python -m benchmarks.peer_step --size small --output peer_step_small.json
    python -m benchmarks.peer_step --size smollm2 --rounds 2 --steps 4 --output peer_step_smollm2.json
    python -m benchmarks.peer_step --size smollm2 --rounds 2 --steps 5 --arms ours ours_bfloat16 trl_autocast --output F
    python -m benchmarks.peer_step --size 0.5b --device cuda --rounds 2 --output peer_step_gpu.json

Runs take turns, each with processes of its own: GTPO here (Megatron ranks, a vLLM engine, Ray), once with entropies
from the trainer and once from the sampler, and GRPO with TRL, whose engine is in its process. The model has random
weights. TRL lets vLLM choose the engine's dtype, which for weights of float32 is bfloat16; ours is float32, so that
sampler and trainer agree to 5e-5 nats. TRL is therefore timed a second time with a float32 engine, and a third time
with what our trainer does to torch and a user of TRL could do as well: products by oneDNN, if
``gtpo_megatron/kernels/cpu_products.py`` chooses them for a model of this size (with AMX it chooses our backward passes
only, and the third is as the second). ``BFLOAT16_ARMS`` are for processors that multiply bfloat16. On a GPU both are
bfloat16 as each project has it, sampler and trainer share the GPU, and ours sleep in turns (``peer_sizes.GPU_ARMS``).
Seconds are medians over the steps after the first two (which compile, or fill caches) and over the rounds; both sides
push the new weights in every step. See ``benchmarks/peer_worker.py`` for what TRL needs on a CPU.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from benchmarks import eager_vllm
from benchmarks.peer_sizes import (
    BFLOAT16_ARMS,
    CPU_ARMS,
    GPU_ARMS,
    GROUP_SIZE,
    MAX_PROMPT_TOKENS,
    SETTLING_STEPS,
    SIZES,
    Device,
    DTypeName,
    SizeName,
    StepSize,
)
from gtpo_megatron.run_folder.metrics_file import read_metrics
from recipes.tiny_cpu import ASSETS

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("rollout", "reward", "score", "credit", "update", "weight_sync")
SHARING = ("to_trainer", "to_push", "to_engine")
"""Stages in which engine and trainer leave the GPU to each other."""

GIB = 1 << 30
SECONDS_TO_END = 10.0
"""That a process which takes too long has to end itself and its children."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        size: of model and batch.
        device: of both sides.
        rounds: turns of every arm.
        steps: of a run; the first two are not counted.
        arms: to run; none: all of the device.
        eager: engines of both sides compile nothing and capture no graphs.
    """

    output: Path
    size: SizeName = "large"
    device: Device = "cpu"
    rounds: int = 3
    steps: int = 7
    arms: tuple[str, ...] = ()
    eager: bool = False


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the arms share.

    Attributes:
        size: of model and batch.
        device: of both sides.
        steps: of a run.
        model: folder of the model.
        scratch: folder for runs, which are thrown away.
        environment: variables of every process.
    """

    size: StepSize
    device: Device
    steps: int
    model: Path
    scratch: Path
    environment: dict[str, str]


def make_model(folder: Path, size: StepSize, device: Device) -> float:
    """Writes a Qwen2 with random weights and the recipes' tokenizer; returns its millions of parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    heads = size.config["hidden_size"] // 64
    config = Qwen2Config(
        **{"num_key_value_heads": 3 if heads % 3 == 0 else heads // 2} | size.config,
        num_attention_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(folder)
    for path in (ASSETS / "tiny_qwen2").iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "generation_config")):
            shutil.copy(path, folder)
    millions = sum(value.numel() for value in model.parameters()) / 1e6
    if device == "cuda":  # nothing of it is left where others measure
        del model
        torch.cuda.empty_cache()
    return millions


@contextmanager
def bench(size: StepSize, *, device: Device, steps: int, eager: bool) -> Iterator[tuple[Bench, float]]:
    """A model in a folder that goes away; also its millions of parameters."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        environment = {"HF_HUB_OFFLINE": "1"}
        if eager:
            eager_vllm.install(scratch / "plugin")
            path = [str(scratch / "plugin"), str(ROOT), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(one for one in path if one)
        millions = make_model(scratch / "model", size, device)
        yield (
            Bench(
                size=size,
                device=device,
                steps=steps,
                model=scratch / "model",
                scratch=scratch,
                environment=environment,
            ),
            millions,
        )


def run(command: Sequence[str], log: Path, environment: dict[str, str], limit_s: float | None = None) -> None:
    """A process to its end.

    Raises:
        RuntimeError: it failed, or took longer than ``limit_s`` seconds; with the end of its log.
    """
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            ended = f"ended with {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            ended = f"took longer than {limit_s:.0f} s"
            _end(process)
    if process.returncode or ended.startswith("took"):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["it said nothing"]
        raise RuntimeError(f"{command[2]} {ended}: {lines[-1][-300:]}\n" + "\n".join(lines)[-3000:])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process, and whatever of its children is left."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    if process.poll() is None:
        process.kill()
        process.wait()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=SECONDS_TO_END)


class _MemoryWatch(threading.Thread):
    """The most memory of the GPU that all its processes use, over what they use now; 0 on a CPU."""

    def __init__(self, device: Device) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._is_over = threading.Event()
        self._is_gpu = device == "cuda"
        self._before = self._used()
        self.start()

    def _used(self) -> int:
        if not self._is_gpu:
            return 0
        free, whole = torch.cuda.mem_get_info()
        return whole - free

    def run(self) -> None:
        while self._is_gpu and not self._is_over.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, self._used() - self._before)

    def end(self) -> int:
        """Stops watching; returns the bytes."""
        self._is_over.set()
        self.join()
        return self.peak_bytes


def run_arm(arm: str, shared: Bench, limit_s: float | None = None) -> dict[str, float]:
    """One run of one side.

    Args:
        arm: of ``CPU_ARMS``, ``BFLOAT16_ARMS`` or ``GPU_ARMS``.
        shared: by all arms.
        limit_s: seconds that it may take.

    Returns:
        Medians over the counted steps: ``step_s`` and, in seconds too, ``rollout_s``, ``score_s``, ``update_s`` and
        ``weight_sync_s``; ``rest_s``, which is what the step takes besides, and of ours ``sharing_s``, its part for
        engine and trainer to leave the GPU to each other; ``tokens`` of its responses; ``run_s`` of the whole run; and
        on a GPU ``gpu_peak_gib``.

    Raises:
        RuntimeError: it failed or took too long.
    """
    begin, watch = time.perf_counter(), _MemoryWatch(shared.device)
    try:
        if arm.startswith("ours"):
            dtype: DTypeName = "bfloat16" if shared.device == "cuda" or "bfloat16" in arm else "float32"
            found = _ours(shared, "rollout" if arm.endswith("sampler_entropies") else "actor", dtype, limit_s)
        else:
            found = _trl(shared, arm, limit_s)
    finally:
        peak = watch.end()
    parts = ("rollout_s", "score_s", "update_s", "weight_sync_s")
    found["rest_s"] = found["step_s"] - sum(found[name] for name in parts)
    found["run_s"] = time.perf_counter() - begin
    if shared.device == "cuda":
        found["gpu_peak_gib"] = peak / GIB
    return found


def our_command(shared: Bench, folder: Path, entropy_source: str, dtype: DTypeName) -> list[str]:
    """A real run: a push each step, next to no evaluation and one checkpoint at its end."""
    size = shared.size
    fields = {
        "num_steps": shared.steps,
        "model.path": shared.model,
        "model.max_sequence_tokens": MAX_PROMPT_TOKENS + size.response_tokens,
        "data.prompts_per_step": size.responses // GROUP_SIZE,
        "rollout.sampling.max_response_tokens": size.response_tokens,
        "evaluation.sampling.max_response_tokens": size.response_tokens,
        "rollout.entropy_source": entropy_source,
        "rollout.max_concurrent_sequences": size.responses,
        "parallel.tensor_parallel_size": 1,
        "parallel.num_ranks": size.ranks,
        "rollout.kv_cache_mib": size.cache_mib if shared.device == "cuda" else size.cache_mib // 2,
        "update.micro_batch_tokens": size.micro_batch_tokens,
        "evaluation.every_steps": 0,
        "evaluation.num_problems": 1,  # measured before and after
        "evaluation.samples": 1,
        "checkpoint.every_steps": 0,
    }
    if shared.device == "cpu":
        fields |= {"cluster.threads_per_rank": 2 // size.ranks, "rollout.num_engines": size.engines}
    flags = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    recipe = f"benchmarks.peer_sizes:{'on_one_gpu' if shared.device == 'cuda' else f'in_{dtype}'}"
    command = [sys.executable, "-m", "gtpo_megatron.cli", "train", recipe, "--run-dir", str(folder)]
    return [*command, *flags, "--checkpoint.no-export-hf"]


def _ours(shared: Bench, entropy_source: str, dtype: DTypeName, limit_s: float | None) -> dict[str, float]:
    folder = shared.scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    command = our_command(shared, folder, entropy_source, dtype)
    run(command, shared.scratch / "ours.log", shared.environment, limit_s)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "timing/step_s" in row][SETTLING_STEPS:]
    found = {"step_s": statistics.median(row["timing/step_s"] for row in rows)}
    found |= {f"{name}_s": statistics.median(row.get(f"timing/{name}_s", 0.0) for row in rows) for name in STAGES}
    sharing = [sum(row.get(f"timing/{name}_s", 0.0) for name in SHARING) for row in rows]
    found["sharing_s"] = statistics.median(sharing)
    found["tokens"] = statistics.median(row["throughput/tokens_per_s"] * row["timing/step_s"] for row in rows)
    return found


def _trl(shared: Bench, arm: str, limit_s: float | None) -> dict[str, float]:
    """The peer's run, of as many steps."""
    size = shared.size
    task = {
        "model": str(shared.model),
        "output_dir": str(shared.scratch / "trl"),
        "prompts": str(ASSETS / "arithmetic" / "train.jsonl"),
        "device": shared.device,
        "max_prompt_tokens": MAX_PROMPT_TOKENS,
        "response_tokens": size.response_tokens,
        "group_size": GROUP_SIZE,
        "responses": size.responses,
        "batch": size.peer_batch,
        "steps": shared.steps,
        "cache_mib": size.cache_mib,
        "engine_dtype": "float32" if "float32_engine" in arm else "auto",
        "trainer_dtype": "bfloat16" if arm == "trl_bfloat16" else "float32",
        "products_in_bfloat16": shared.device == "cuda" or arm in BFLOAT16_ARMS,
        "sleeps": arm == "trl_asleep",
        "onednn_hidden_size": size.config["hidden_size"] if arm.endswith("onednn") else 0,
    }
    log = shared.scratch / "trl.log"
    command = [sys.executable, "-m", "benchmarks.peer_worker", json.dumps(task)]
    run(command, log, shared.environment, limit_s)
    (line,) = (line for line in log.read_text(errors="replace").splitlines() if line.startswith("PEER "))
    spent = json.loads(line.removeprefix("PEER "))
    return {name: statistics.median(values[SETTLING_STEPS:]) for name, values in spent.items()}


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure of an arm."""
    return {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}


def ratios(found: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Our step over TRL's, for every pair of arms: the median of the rounds that both have."""
    return {
        f"{arm}_over_{peer}": statistics.median(
            mine["step_s"] / theirs["step_s"] for mine, theirs in zip(found[arm], found[peer], strict=False)
        )
        for arm in found
        for peer in found
        if arm.startswith("ours") and peer.startswith("trl") and found[arm] and found[peer]
    }


def bfloat16_updates(found: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Our update in bfloat16 over that in float32, of arms that have both; ratios as above."""
    return {
        arm: statistics.median(
            half["update_s"] / single["update_s"] for half, single in zip(found[arm], found[other], strict=False)
        )
        for arm in found
        if arm.startswith("ours_bfloat16") and found[arm] and found.get(other := arm.replace("_bfloat16", ""))
    }


def main() -> None:
    """Runs the arms in turns, prints a table, writes the JSON."""
    import tyro

    options = tyro.cli(Options, description=__doc__)
    arms = options.arms or (GPU_ARMS if options.device == "cuda" else CPU_ARMS)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    size = SIZES[options.size]
    with bench(size, device=options.device, steps=options.steps, eager=options.eager) as (shared, millions):
        for number in range(options.rounds):
            for arm in arms if number % 2 == 0 else arms[::-1]:
                found[arm].append(run_arm(arm, shared))
                print(f"round {number}: {arm}: {found[arm][-1]['step_s']:.2f} s a step", flush=True)
    result = {
        "size": options.size,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "eager": options.eager,
        "parameters_millions": round(millions, 2),
        "responses": size.responses,
        "response_tokens": size.response_tokens,
        "rounds": found,
        "medians": {arm: medians(rows) for arm, rows in found.items()},
        "ratios": ratios(found),
        "bfloat16_over_float32_updates": bfloat16_updates(found),
        "target": size.target,
        "processor": torch.cpu.get_capabilities()["cpu_name"],
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for arm, rows in found.items():
        print(f"{arm:24} {medians(rows)['step_s']:6.2f} s a step")
    for name, ratio in ratios(found).items():
        print(f"{name:48} {ratio:5.2f}")
    for arm, ratio in bfloat16_updates(found).items():
        print(f"{arm}: {ratio:.2f} of float32's update")


if __name__ == "__main__":
    main()
