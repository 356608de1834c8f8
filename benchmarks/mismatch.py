"""The mismatch gate as a detector: false stops over clean steps, and which planted faults are caught, and by what.

``python -m benchmarks.mismatch --output mismatch.json --work FOLDER --minutes 6`` runs a real trainer and a real vLLM,
each cell in a process of its own: a model, its dtypes and a temperature. Clean steps sample, score, learn and push, as
a run does; then each fault of ``mismatch_faults`` is planted at a push. Cells that are done lie in the folder: the same
command goes on with the others, and writes what there is.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.mismatch_faults import ON_PUSH, ON_SAMPLING, TEMPERATURE
from gtpo_megatron.mismatch.statistics import GAP, KL, PREFIX, SCALED

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "recipes" / "assets" / "tiny_qwen2"
DTYPES = {
    "float32": ("float32", "float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16", "model"),
    "bfloat16, float32 head": ("bfloat16", "bfloat16", "float32"),
}
"""Of trainer, sampler and sampler's output layer."""

TEMPERATURES = (1.0, 0.6)
STEPS = {"tiny": 66, "14m": 18}
"""Clean steps of a cell: 504 over all twelve."""

PROMPTS = {"tiny": 8, "14m": 4}
FAULTS = (*ON_PUSH, *ON_SAMPLING, TEMPERATURE)
FIGURES = (f"{GAP}_mean", f"{GAP}_p50", f"{GAP}_p99", f"{GAP}_max", SCALED, KL)
LONGEST_CELL_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        work: folder of cells.
        minutes: no cell is begun later, nor if the longest so far would not end in time.
        models: which.
        dtypes: which.
        temperatures: which.
        faults: which.
        num_steps: clean steps of a cell; 0: as many as make 504 in all.
    """

    output: Path
    work: Path
    minutes: float = 60.0
    models: tuple[str, ...] = tuple(STEPS)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    temperatures: tuple[float, ...] = TEMPERATURES
    faults: tuple[str, ...] = FAULTS
    num_steps: int = 0


def cells(options: Options) -> Iterator[tuple[str, str, float, Path]]:
    """Model, dtypes, temperature and result of every cell."""
    for model in options.models:
        for temperature in options.temperatures:
            for dtypes in options.dtypes:
                name = f"{model}_{dtypes}_{temperature}".replace(", ", "_").replace(" ", "_")
                yield model, dtypes, temperature, options.work / f"{name}.jsonl"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Of a cell that is done; else none."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return found[:-1] if found and found[-1].get("done") else []


def run(options: Options) -> None:
    """Runs cells that are not done while there is time."""
    options.work.mkdir(parents=True, exist_ok=True)
    begin, longest = time.monotonic(), 0.0
    for model, dtypes, temperature, path in cells(options):
        left = options.minutes * 60 - (time.monotonic() - begin)
        if lines_of(path):
            continue
        if left < longest or left <= 0:
            break
        start = time.monotonic()
        trainer, sampler, head = DTYPES[dtypes]
        cell = {"trainer": trainer, "sampler": sampler, "head": head, "temperature": temperature}
        cell |= {"prompts": PROMPTS[model], "is_random": model != "tiny"}
        folder = TINY if model == "tiny" else random_model(options.work / model)
        arguments = [json.dumps(cell), str(folder), str(options.num_steps or STEPS[model]), json.dumps(options.faults)]
        scratch = path.with_suffix(".partial")
        with path.with_suffix(".log").open("wb") as log:
            subprocess.run(
                [sys.executable, "-m", "benchmarks.mismatch_cell", *arguments, str(scratch)],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=LONGEST_CELL_S,
            )
        scratch.rename(path)
        longest = max(longest, time.monotonic() - start)


def random_model(folder: Path) -> Path:
    """A Qwen2 of 14 million random weights with tied embeddings and the tiny model's tokenizer."""
    if (folder / "model.safetensors").exists():
        return folder
    import shutil

    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    torch.manual_seed(0)
    spread = 0.1  # wide enough for logits and attention of a trained model's size
    config = Qwen2Config(
        vocab_size=16384,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):
                parameter.normal_(0, spread)
    model.save_pretrained(folder)
    return folder


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one cell."""
    clean = [line for line in lines if "step" in line]
    figures = {
        name.removeprefix(PREFIX): {
            "median": statistics.median(line["figures"][name] for line in clean),
            "largest": max(line["figures"][name] for line in clean),
        }
        for name in FIGURES
    }
    return {
        "clean_steps": len(clean),
        "tokens_of_a_step": round(statistics.mean(line["num_tokens"] for line in clean)),
        "false_stops": [line for line in clean if line["broken"]],
        "figures": figures,
        "faults": [_fault(line) for line in lines if "fault" in line],
    }


def _fault(line: dict[str, Any]) -> dict[str, Any]:
    reasons = {"gate": line["broken"], "checksum": line["checksum"], "settings": line["settings"]}
    return {
        "fault": line["fault"],
        "updates_missed": line["updates_missed"],
        "caught_by": [by for by, reason in reasons.items() if reason],
        "broken": line["broken"],
        "looks_like": line.get("looks_like", ""),
        "gap_mean": line["figures"].get(f"{GAP}_mean"),
        "gap_scaled": line["figures"].get(SCALED),
    }


def main() -> None:
    options = tyro.cli(Options)
    run(options)
    found = {path.stem: summary(lines) for *_, path in cells(options) if (lines := lines_of(path))}
    faults = [fault for cell in found.values() for fault in cell["faults"]]
    totals = {
        "cells_done": len(found),
        "clean_steps": sum(cell["clean_steps"] for cell in found.values()),
        "false_stops": sum(len(cell["false_stops"]) for cell in found.values()),
        "faults_planted": len(faults),
        "faults_caught": sum(bool(fault["caught_by"]) for fault in faults),
        "missed": [
            f"{name}: {fault['fault']} ({fault['updates_missed']})"
            for name, cell in found.items()
            for fault in cell["faults"]
            if not fault["caught_by"]
        ],
    }
    options.output.write_text(json.dumps({"totals": totals, "cells": found}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(totals, indent=1))


if __name__ == "__main__":
    main()
