"""How long a save holds up training: waiting for the disk, and writing in the background.

    python -m benchmarks.checkpoint --json checkpoint.json

Two Megatron ranks (TP 2, gloo) hold a model with filled Adam moments. A round saves it twice, to one disk: once
waiting, once in the background. Waiting is from the call until the checkpoint has its name. In the background,
training is blocked by the snapshot and, at a later step, by the index that is written once all ranks are done; naming
is a thread of the driver's. The slowest rank counts, a ratio is taken within a round, figures are medians. Training
does not run meanwhile, so the figures are of the save alone.
"""

import dataclasses
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from safetensors.torch import save_file
from transformers import Qwen2Config

from gtpo_megatron.config.output import CheckpointConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder, DriverState
from gtpo_megatron.run_folder.manifest import run_facts
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.reshard import hf_shapes
from recipes import tiny_cpu

NUM_RANKS = 2
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model and the number of rounds.

    Attributes:
        hidden_size: of the model.
        layers: of the model.
        vocab: rows of the embedding and of the output layer.
        sharded_optimizer: two data-parallel ranks with Megatron's distributed optimizer, in place of TP 2.
        rounds: repetitions, after one that is thrown away.
        folder: on the disk to be measured; empty: the system's folder for temporary files.
        json: file to write; empty: standard output only.
    """

    hidden_size: int = 768
    layers: int = 8
    vocab: int = 16384
    sharded_optimizer: bool = False
    rounds: int = 5
    folder: str = ""
    json: str = ""


def make_model(folder: Path, options: Options) -> None:
    """Random weights in Hugging Face format."""
    Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=options.vocab,
        hidden_size=options.hidden_size,
        intermediate_size=3 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    shapes = hf_shapes(read_architecture(folder))
    save_file({name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")


def make_config(model: Path, options: Options) -> RunConfig:
    """The quickstart's configuration with another model."""
    base = tiny_cpu.gtpo()
    layout = {"distributed_optimizer": True} if options.sharded_optimizer else {"tensor_parallel_size": NUM_RANKS}
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, path=str(model)),
        parallel=dataclasses.replace(base.parallel, **{"tensor_parallel_size": 1, **layout}),
        cluster=dataclasses.replace(base.cluster, stage_deadline_s=1200.0),
    )


def fill_moments(optimizer: Any) -> None:
    """As after an update; zeros would share one page of memory."""
    from gtpo_megatron.actor.checkpoint.optimizer_state import ensure_moments

    ensure_moments(optimizer)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            state["exp_avg"].normal_()
            state["exp_avg_sq"].uniform_()


class Ranks:
    """A rank that saves beside another; rank 0 does the driver's part too."""

    def __init__(self, rank: int, config: RunConfig, store: str, folder: Path) -> None:
        from gtpo_megatron.actor.actor import MegatronActor

        self._rank = rank
        self._actor = MegatronActor(config, global_rank=rank, init_method=f"file://{store}")
        fill_moments(self._actor._optimizer)
        self._folder = CheckpointFolder(folder)
        self._facts = run_facts(config, read_architecture(Path(config.model.path)))

    def save(self, step: int, *, in_background: bool) -> dict[str, float]:
        """Seconds of the two parts in which training waits, and in between."""
        scratch = self._share(str(self._folder.begin(step)) if self._rank == 0 else None)
        start = time.perf_counter()
        self._actor.checkpoint.begin(Path(scratch), in_background=in_background)
        begun = time.perf_counter()
        while in_background and not self._all(self._actor.checkpoint.is_written()):
            time.sleep(POLL_S)
        written = time.perf_counter()
        parts = self._gather(self._actor.checkpoint.finish())
        collected = time.perf_counter()
        if self._rank == 0:  # in a run a thread of the driver does this while training goes on
            self._folder.finish(
                Path(scratch),
                DriverState(step=step, sampler={}, counters={}, mismatch={"samples": []}),
                run=self._facts,
                checksums={name: checksum for part in parts for name, checksum in part.items()},
                scores={},
                config=CheckpointConfig(keep=1),
            )
        self._gather(None)
        return {
            "begin_s": begun - start,
            "writing_s": written - begun,
            "collect_s": collected - written,
            "name_s": time.perf_counter() - collected,
        }

    def slowest(self, times: dict[str, float]) -> dict[str, float]:
        """Over ranks."""
        parts = self._gather(times)
        return {name: max(part[name] for part in parts) for name in times}

    def _gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist  # noqa: TID251 - two ranks without a driver

        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def _share(self, value: Any) -> Any:
        return self._gather(value)[0]

    def _all(self, value: bool) -> bool:
        return all(self._gather(value))


def _rank_main(rank: int, options: Options, model: str, work: str, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.manual_seed(rank)
    ranks = Ranks(rank, make_config(Path(model), options), f"{work}/store", Path(work) / "checkpoints")
    rounds = []
    for number in range(options.rounds + 1):
        waiting = ranks.slowest(ranks.save(2 * number + 1, in_background=False))
        background = ranks.slowest(ranks.save(2 * number + 2, in_background=True))
        blocking_s = waiting["begin_s"] + waiting["collect_s"] + waiting["name_s"]
        blocked_s = background["begin_s"] + background["collect_s"]
        rounds.append(
            {
                "blocking_s": blocking_s,
                "background_blocked_s": blocked_s,
                "background_snapshot_s": background["begin_s"],
                "background_index_s": background["collect_s"],
                "background_writing_s": background["writing_s"],
                "background_naming_s": background["name_s"],
                "ratio": blocked_s / blocking_s,
            }
        )
    pipe.send(rounds[1:])


def main() -> None:
    """Runs the benchmark and prints the medians."""
    options = tyro.cli(Options, description=__doc__)
    work = tempfile.mkdtemp(dir=options.folder or None)
    try:
        model = Path(work) / "model"
        make_model(model, options)
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(target=_rank_main, args=(rank, options, str(model), work, sender))
            for rank in range(NUM_RANKS)
        ]
        for process in processes:
            process.start()
        rounds = receiver.recv()
        for process in processes:
            process.join()
        config = make_config(model, options)
        [checkpoint] = (Path(work) / "checkpoints").glob("step_*")
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
    finally:
        shutil.rmtree(work)
    medians = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    result = {
        "options": asdict(options),
        "layout": str(config.parallel),
        "checkpoint_mib": size / 2**20,
        "load_average": os.getloadavg()[0],
        "medians": medians,
        "rounds": rounds,
    }
    print(
        f"checkpoint of {size / 2**20:.0f} MiB: waiting for the disk {medians['blocking_s']:.2f} s; in the background "
        f"{medians['background_blocked_s']:.3f} s blocked (snapshot {medians['background_snapshot_s']:.3f}, index "
        f"{medians['background_index_s']:.3f}); ratio {medians['ratio']:.3f}"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
