"""What it saves to take entropies from the sampler: the quickstart's step with a scoring pass and without.

``python -m benchmarks.rollout_entropy --output rollout_entropy.json`` trains the quickstart's recipe for some steps,
once with each ``rollout.entropy_source``, in turns; ratios are taken within a turn, and medians over turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from gtpo_megatron.run_folder.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("actor", "rollout")
STAGES = ("rollout", "reward", "score", "credit", "update", "weight_sync", "step")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        turns: how often both are run.
        num_steps: of a run; the first is left out of the figures.
    """

    output: Path
    turns: int = 3
    num_steps: int = 8


def run(source: str, num_steps: int, folder: Path) -> dict[str, Any]:
    """Medians over the steps of one run."""
    trainer = Path(sys.executable).with_name("gtpo-megatron")
    command = [str(trainer), "train", "recipes.tiny_cpu:gtpo", "--run-dir", str(folder), "--num-steps", str(num_steps)]
    command += ["--rollout.entropy-source", source, "--evaluation.every-steps", "0", "--evaluation.num-problems", "8"]
    command += ["--checkpoint.every-steps", "0", "--checkpoint.no-export-hf"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "timing/step_s" in row][1:]
    figures: dict[str, Any] = {f"{s}_s": statistics.median(row[f"timing/{s}_s"] for row in rows) for s in STAGES}
    figures["logprob_gap_max_nats"] = max(row["sync/logprob_gap_max"] for row in rows)
    figures["entropy_nats"] = [row["policy/entropy_nats"] for row in rows]
    return figures


def main() -> None:
    options = tyro.cli(Options)
    turns = []
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(options.turns):
            order = SOURCES if turn % 2 == 0 else SOURCES[::-1]
            turns.append({s: run(s, options.num_steps, Path(scratch) / f"{turn}_{s}") for s in order})
            load = os.getloadavg()[0]
            print(
                f"turn {turn}: " + ", ".join(f"{s} {turns[-1][s]['step_s']:.2f} s" for s in SOURCES), f"load {load:.1f}"
            )
    ratios = {
        f"{stage}_ratio": statistics.median(
            turn["rollout"][f"{stage}_s"] / turn["actor"][f"{stage}_s"] for turn in turns
        )
        for stage in STAGES
    }
    results = {"turns": turns, **ratios, "cores": os.cpu_count(), "load_at_end": os.getloadavg()[0]}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for name, value in ratios.items():
        print(f"{name:20} {value:.3f}   (sampler's entropies over the trainer's)")


if __name__ == "__main__":
    main()
