"""Where generation's time goes on a CPU: engines that differ from ours in one thing sample the same batch in turns.

    python -m benchmarks.generation_switches --size large --output generation_switches.json

Every engine is a process of its own, on both cores, and waits while another one samples. Model, prompts and batch are
those of ``benchmarks.peer_step``, of which ``bare`` is the peer's engine. Ratios to ``ours`` are taken within a round,
since such machines are up to twice as fast in one minute as in another; the median over rounds counts.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import tyro

from benchmarks.generation import requests_of
from benchmarks.peer_sizes import GROUP_SIZE, MAX_PROMPT_TOKENS, SIZES, SizeName
from benchmarks.peer_step import make_model
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.rollout.engine_arguments import CPU_ENVIRONMENT, engine_environment

BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A process that wants a core, and ends with this one however that ends."""

Generate = Callable[[int], int]
"""Samples the batch with a seed; returns its tokens."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine and what is different about it.

    Attributes:
        is_ours: ``VllmEngine``; else ``vllm.LLM`` as the peer starts it.
        is_compiled: by torch's compiler.
        has_seeds: each response has one; ours always do.
        entropies: our sampler notes them.
        spins: turns that a thread waits by spinning before it sleeps; None: libgomp's 300,000, as the peer's.
    """

    is_ours: bool = True
    is_compiled: bool = False
    has_seeds: bool = True
    entropies: bool = False
    spins: int | None = int(CPU_ENVIRONMENT["GOMP_SPINCOUNT"])

    def variables(self, config: RolloutConfig) -> dict[str, str]:
        """Of its process; libgomp reads its own when torch is loaded."""
        found = engine_environment(config, has_gpus=False)
        for name in ("GOMP_SPINCOUNT", "TORCHDYNAMO_DISABLE"):
            found.pop(name)
        if not self.is_compiled:
            found["TORCHDYNAMO_DISABLE"] = "1"
        if self.spins is not None:
            found["GOMP_SPINCOUNT"] = str(self.spins)
        return found | {"OMP_NUM_THREADS": str(os.cpu_count())}


ENGINES = {
    "ours": Engine(),
    "ours_entropies": Engine(entropies=True),
    "ours_asleep": Engine(spins=0),
    "ours_spinning": Engine(spins=None),
    "ours_compiled": Engine(is_compiled=True),
    "bare_eager": Engine(is_ours=False, has_seeds=False, spins=None),
    "bare_seeds": Engine(is_ours=False, is_compiled=True, spins=None),
    "bare": Engine(is_ours=False, is_compiled=True, has_seeds=False, spins=None),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        size: of model and batch.
        rounds: batches of each engine.
        engines: to compare with ``ours``; none: all.
        busy: other processes meanwhile, each of which wants a core for itself.
        worker: of this program alone: an engine to be.
        model: of this program alone: its folder.
    """

    output: Path = Path("generation_switches.json")
    size: SizeName = "large"
    rounds: int = 7
    engines: tuple[str, ...] = ()
    busy: int = 0
    worker: str = ""
    model: str = ""


def configuration(size: SizeName, engine: Engine) -> RolloutConfig:
    """Settings of ours, as in ``benchmarks.peer_step``."""
    return RolloutConfig(
        group_size=GROUP_SIZE,
        dtype="float32",
        kv_cache_mib=SIZES[size].cache_mib // 2,
        entropy_source="rollout" if engine.entropies else "actor",
        max_concurrent_sequences=SIZES[size].responses,
    )


def ours(options: Options, engine: Engine) -> Generate:
    """Our engine."""
    from gtpo_megatron.rollout import vllm_engine

    arguments = vllm_engine.llm_arguments
    # of a run, an engine on a CPU is always eager
    vllm_engine.llm_arguments = lambda *given, **named: (
        arguments(*given, **named) | {"enforce_eager": not engine.is_compiled}
    )
    size = SIZES[options.size]
    sampler = vllm_engine.VllmEngine(
        options.model,
        configuration(options.size, engine),
        max_sequence_tokens=MAX_PROMPT_TOKENS + size.response_tokens,
        seed=0,
        num_threads=os.cpu_count() or 1,
    )
    requests = requests_of(size.responses // GROUP_SIZE, GROUP_SIZE, options.model)
    sampling = SamplingConfig(max_response_tokens=size.response_tokens)

    def generate(seed: int) -> int:
        sampler.forget_prefixes()
        return int(sampler.generate(requests, sampling, seed=seed).response_lengths.sum())

    return generate


def bare(options: Options, engine: Engine) -> Generate:
    """vLLM's, with the peer's arguments."""
    from vllm import LLM, SamplingParams

    size = SIZES[options.size]
    llm = LLM(
        model=options.model,
        dtype="float32",
        max_num_seqs=size.responses,
        max_model_len=MAX_PROMPT_TOKENS + size.response_tokens,
        kv_cache_memory_bytes=size.cache_mib << 20,
        enforce_eager=not engine.is_compiled,
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    requests = requests_of(size.responses // GROUP_SIZE, GROUP_SIZE, options.model)
    prompts: list[Any] = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]

    def generate(seed: int) -> int:
        llm.reset_prefix_cache()
        params = [
            SamplingParams(
                max_tokens=size.response_tokens,
                logprobs=0,
                seed=request.seed(seed) if engine.has_seeds else None,
                detokenize=False,
            )
            for request in requests
        ]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    return generate


def work(options: Options) -> None:
    """An engine's process: a line of JSON for its start, and one for every line that it is sent."""
    engine, begin = ENGINES[options.worker], time.perf_counter()
    generate = (ours if engine.is_ours else bare)(options, engine)
    generate(0)
    print("ENGINE " + json.dumps({"start_s": time.perf_counter() - begin}), flush=True)
    for line in sys.stdin:
        begin, spent = time.perf_counter(), time.process_time()
        tokens = generate(int(line))
        found = {"s": time.perf_counter() - begin, "processor_s": time.process_time() - spent, "tokens": tokens}
        print("ENGINE " + json.dumps(found), flush=True)


def answer(output: IO[str], log: Path) -> dict[str, float]:
    """The next line of an engine; its log's end if there is none."""
    for line in output:
        if line.startswith("ENGINE "):
            return dict(json.loads(line.removeprefix("ENGINE ")))
    raise RuntimeError(f"the engine has ended:\n{log.read_text(errors='replace')[-3000:]}")


def main() -> None:
    """Starts the engines one after the other, lets them take turns, writes the JSON."""
    options = tyro.cli(Options, description=__doc__)
    if options.worker:
        work(options)
        return
    names = ["ours", *(name for name in options.engines or ENGINES if name != "ours")]
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_model(model, SIZES[options.size], "cpu")
        processes, starts = {}, {}
        for name in names:
            log = Path(scratch) / f"{name}.log"
            arguments = ["--size", options.size, "--worker", name, "--model", str(model)]
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.generation_switches", *arguments],
                env=os.environ | ENGINES[name].variables(configuration(options.size, ENGINES[name])),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
            )
            processes[name] = process
            starts[name] = answer(process.stdout, log)["start_s"]  # type: ignore[arg-type]
            print(f"{name}: first batch after {starts[name]:.1f} s", flush=True)
        others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(options.busy)]
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(options.rounds):
            row = {}
            for name in names if number % 2 == 0 else names[::-1]:
                process = processes[name]
                print(number + 1, file=process.stdin, flush=True)
                row[name] = answer(process.stdout, Path(scratch) / f"{name}.log")  # type: ignore[arg-type]
            rounds.append(row)
        for process in (*processes.values(), *others):
            process.kill()
            process.wait()
    result = {
        "size": options.size,
        "busy": options.busy,
        "engines": {name: dataclasses.asdict(ENGINES[name]) for name in names},
        "start_s": starts,
        "rounds": rounds,
        "medians": {name: statistics.median(row[name]["s"] for row in rounds) for name in names},
        "over_ours": {name: statistics.median(row[name]["s"] / row["ours"]["s"] for row in rounds) for name in names},
        "processor": torch.cpu.get_capabilities()["cpu_name"],
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name in names:
        print(f"{name:24} {result['medians'][name]:6.2f} s, {result['over_ours'][name]:.3f} of ours")


if __name__ == "__main__":
    main()
