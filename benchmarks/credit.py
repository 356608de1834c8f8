"""Time and memory of credit on one core, beside those of another commit, and the lines of source that it takes.

    git worktree add ../before COMMIT
    python -m benchmarks.credit --baseline ../before

Both packages run in processes of their own, on the same batch, one call after the other in turn; a ratio is the median
over rounds of the ratio within a round, in CPU time. ``cumsum`` is one pass of ``torch.cumsum`` over the padded
entropies, for machines without a baseline. Memory is the peak of the resident set over what the inputs take, the two
padded outputs included, in bytes per token of the policy: with each buffer mapped by itself (``extra``), and with what
glibc's heap keeps besides (``resident``), which depends on what the process did before.
"""

import ast
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.credit_worker import CONFIGS

ROOT = Path(__file__).parents[1]
SOURCE = [
    *(f"algorithms/{name}.py" for name in ("sums", "token_batch", "assign_credit")),
    *(f"algorithms/credit/{name}.py" for name in ("gtpo", "grpo_s", "shaping", "standardise")),
    "distributed/advantage_reducer.py",
]
"""Formulas, sums and reducer; without losses, penalties, controls, diagnostics, configuration."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The batch and the number of rounds.

    Attributes:
        groups: prompt groups.
        group_size: responses a group.
        max_tokens: padded length; response lengths are uniform in [1, max_tokens], so that half of it is padding.
        rounds: repetitions.
        baseline: another checkout to compare with; empty: none.
        json: file to write.
    """

    groups: int = 32
    group_size: int = 16
    max_tokens: int = 4096
    rounds: int = 15
    baseline: str = ""
    json: str = "benchmarks/results/credit.json"


class Worker:
    """A process with the package of one checkout.

    Args:
        checkout: its folder.
        options: the batch.
        environment: further variables.
    """

    def __init__(self, checkout: Path, options: Options, **environment: str) -> None:
        script = str(ROOT / "benchmarks" / "credit_worker.py")
        sizes = (options.groups, options.group_size, options.max_tokens)
        self.process = subprocess.Popen(
            [sys.executable, script, *map(str, sizes)],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str) -> float:
        """See ``credit_worker``."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


def measure_times(options: Options) -> dict[str, dict[str, float]]:
    """Seconds and ratios by configuration."""
    now = Worker(ROOT, options)
    before = Worker(Path(options.baseline), options) if options.baseline else None
    results = {}
    for name in ("cumsum", *CONFIGS):
        rounds = []
        for _ in range(options.rounds + 1):
            row = {"seconds": now.ask(name), "cumsum": now.ask("cumsum")}
            if before is not None:
                row["baseline_seconds"] = before.ask(name)
            rounds.append(row)
        del rounds[0]  # the first is slower
        result = {key: statistics.median(r[key] for r in rounds) for key in rounds[0] if key != "cumsum"}
        result["ratio_to_cumsum"] = statistics.median(r["seconds"] / r["cumsum"] for r in rounds)
        if before is not None:
            result["ratio_to_baseline"] = statistics.median(r["seconds"] / r["baseline_seconds"] for r in rounds)
        results[name] = result
    for worker in filter(None, (now, before)):
        worker.close()
    return results


def measure_memory(options: Options, name: str, checkout: Path) -> dict[str, float]:
    """Peak extra bytes a token, in fresh processes."""
    found = {}
    for kind, environment in (("extra", {"MALLOC_MMAP_THRESHOLD_": "65536"}), ("resident", {})):
        worker = Worker(checkout, options, **environment)
        found[f"{kind}_bytes_per_token"] = worker.ask(f"memory {name}") / worker.ask("tokens")
        worker.close()
    return found


def lines_of_source() -> dict[str, int]:
    """Lines of the credit part: those of code, and all of them."""
    code = total = 0
    for path in (ROOT / "gtpo_megatron" / name for name in SOURCE):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        texts = {
            number
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        total += len(lines)
        code += sum(
            bool(line.strip()) and not line.strip().startswith("#") and number not in texts
            for number, line in enumerate(lines, 1)
        )
    return {"code": code, "with_docstrings_comments_and_blanks": total}


def main() -> None:
    """Runs the benchmark and prints a table."""
    options = tyro.cli(Options, description=__doc__)
    results = measure_times(options)
    for name in CONFIGS:
        results[name] |= measure_memory(options, name, ROOT)
        if options.baseline:
            before = measure_memory(options, name, Path(options.baseline))
            results[name] |= {f"baseline_{key}": value for key, value in before.items()}
    worker = Worker(ROOT, options)
    report: dict[str, Any] = {
        "options": {**asdict(options), "baseline": bool(options.baseline)},
        "tokens": int(worker.ask("tokens")),
        "lines_of_source": lines_of_source(),
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "results": results,
    }
    worker.close()
    for name, row in results.items():
        against = f"{row['ratio_to_baseline']:6.2f} x baseline" if options.baseline else ""
        memory = f"{row['extra_bytes_per_token']:6.1f} bytes a token" if "extra_bytes_per_token" in row else ""
        print(f"{name:16s} {1e3 * row['seconds']:8.1f} ms {row['ratio_to_cumsum']:7.2f} x cumsum {against} {memory}")
    print(f"{report['tokens']:,} tokens; lines of source: {report['lines_of_source']}")
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
