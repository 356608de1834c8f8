"""Answers graded a second, and what a row that hangs the solver costs.

    python -m benchmarks.grading --json grading.json

``answers_per_cpu_s`` divides by the processor time of the workers instead of the clock's, which on a busy machine is
the figure to trust: times the number of idle cores it is what the clock would say.

Responses are long texts that end in an answer, in groups of one problem: 16 samples of which some are right, some
wrong, some written another way. Integers (AIME, DAPO-Math-17k) and LaTeX (MATH-500, OlympiadBench) are measured apart,
each with numbers drawn anew so that no cache helps beyond a group. The hanging row is ``9^(9^(9^9)) + 1``.
"""

import json
import os
import platform
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool

MATH = "gtpo_megatron.rewards.math_answer:math_answer"
HANGING = "So it is \\boxed{9^{9^{9^{9}}}+1}."
PROSE = "We combine the two equations and simplify, which leaves one unknown on the left side. " * 100
"""About 9,000 characters, as responses of 2,000 to 4,000 tokens are."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much, and with what.

    Attributes:
        problems: of each kind.
        group_size: responses a problem.
        num_workers: grading processes.
        timeout_s: of a row.
        rounds: repetitions.
        json: file to write; empty: standard output only.
    """

    problems: int = 60
    group_size: int = 16
    num_workers: int = 2
    timeout_s: float = 10.0
    rounds: int = 3
    json: str = ""


Rows = list[tuple[str, str]]


def integer_rows(options: Options, rng: random.Random) -> Rows:
    """Three-digit answers, boxed or on an answer line."""
    rows = []
    for _ in range(options.problems):
        reference = rng.randint(0, 999)
        for _ in range(options.group_size):
            given = reference if rng.random() < 0.5 else rng.randint(0, 999)
            form = rng.choice(("so \\boxed{%d}.", "\nAnswer: %d", "\\boxed{%d}", "\\boxed{%d\\text{ units}}"))
            rows.append((PROSE + form % given, str(reference)))
    return rows


def latex_rows(options: Options, rng: random.Random) -> Rows:
    """Fractions, roots, tuples, intervals, polynomials, sets; right ones are often written another way."""
    rows = []
    for _ in range(options.problems):
        a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 99)
        reference, *others = rng.choice(
            [
                (f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}", f"\\dfrac{{{2 * a}}}{{{2 * b}}}", f"\\frac{{{b}}}{{{a}}}"),
                (f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{a * a * b}}}", f"{a}\\sqrt{{{c}}}", f"{a}\\cdot\\sqrt{b}"),
                (f"({a}, {b})", f"\\left({a},{b}\\right)", f"({b},{a})", f"({a}.0, {b})"),
                (f"[{a},{a + b})", f"[{a}, {a + b})", f"({a},{a + b})", f"x \\in [{a},{a + b})"),
                (f"x^2+{a}x+{b}", f"{b}+{a}x+x^2", f"x^2-{a}x+{b}", f"x(x+{a})+{b}"),
                (f"\\{{{a},{b},{c}\\}}", f"{a},{b},{c}", f"\\{{{c},{b},{a}\\}}", f"\\{{{a},{b}\\}}"),
                (f"{a}\\pi", f"{a} \\pi", f"{b}\\pi", f"\\frac{{{2 * a}\\pi}}{{2}}"),
            ]
        )
        for _ in range(options.group_size):
            given = reference if rng.random() < 0.4 else rng.choice(others)
            rows.append((f"{PROSE}so $\\boxed{{{given}}}$.", reference))
    return rows


def measure(options: Options) -> dict[str, Any]:
    """Answers a second by kind, and the cost of one hanging row."""
    rng = random.Random(0)
    rates: dict[str, list[float]] = {"integers": [], "latex": [], "mixed": []}
    cpu_rates: dict[str, list[float]] = {name: [] for name in rates}
    costs, num_failed = [], 0
    with RewardPool(RewardConfig(function=MATH, num_workers=options.num_workers, timeout_s=options.timeout_s)) as pool:
        grade(pool, latex_rows(options, rng)[:200])  # sympy imports parts of itself at first use
        for _ in range(options.rounds):
            integers, latex = integer_rows(options, rng), latex_rows(options, rng)
            mixed = integer_rows(options, rng) + latex_rows(options, rng)
            rng.shuffle(mixed)
            for name, rows in (("integers", integers), ("latex", latex), ("mixed", mixed)):
                cpu_start = cpu_seconds(pool)
                seconds, failures = grade(pool, rows)
                num_failed += failures
                rates[name].append(len(rows) / seconds)
                if not failures:  # a replaced worker takes its processor time along
                    cpu_rates[name].append(len(rows) / (cpu_seconds(pool) - cpu_start))
            without, _ = grade(pool, integers)
            with_one, failures = grade(pool, [(HANGING, "4"), *integers])
            assert failures == 1, failures
            costs.append(with_one - without)
    return {
        "answers_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "answers_per_cpu_s": {
            name: round(statistics.median(values), 1) for name, values in cpu_rates.items() if values
        },
        "ordinary_rows_without_verdict": num_failed,
        "hanging_row": {"limit_s": options.timeout_s, "cost_s": round(statistics.median(costs), 2)},
    }


def cpu_seconds(pool: RewardPool) -> float:
    """Of all workers so far."""
    workers = [one for pid in pool.process_ids for one in psutil.Process(pid).children(recursive=True)]
    return sum(sum(worker.cpu_times()[:2]) for worker in workers)


def grade(pool: RewardPool, rows: Rows) -> tuple[float, int]:
    """Seconds, and how many rows have no verdict."""
    start = time.perf_counter()
    verdicts = pool.grade([RewardRequest(response=response, answer=answer) for response, answer in rows])
    seconds = time.perf_counter() - start
    return seconds, sum(verdict.failure is not None for verdict in verdicts)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    result = {
        "options": asdict(options),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load_average": os.getloadavg()[0],
        **measure(options),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
