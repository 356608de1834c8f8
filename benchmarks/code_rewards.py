"""Programs graded a second, by the kind of their tests, and what a program that hangs costs.

    python -m benchmarks.code_rewards --json code_rewards.json

``programs_per_cpu_s`` divides by the processor time of sandboxes and graders instead of the clock's, which on a busy
machine is the figure to trust: times the number of idle cores it is what the clock would say. Programs are short and
right, a new one each time, with three tests.
"""

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool

SHARE = "gtpo_megatron.rewards.code_tests:share_of_tests"
NUM_TESTS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much, and with what.

    Attributes:
        programs: of each kind.
        num_workers: grading processes, each with a sandbox.
        rounds: repetitions.
        sandbox: as in ``--reward.sandbox``.
        timeout_s: of a row.
        hanging_test_s: limit of a test of the program that hangs.
        json: file to write; empty: standard output only.
    """

    programs: int = 200
    num_workers: int = 2
    rounds: int = 3
    sandbox: str = "bubblewrap"
    timeout_s: float = 60.0
    hanging_test_s: float = 2.0
    json: str = ""


def calls(number: int) -> RewardRequest:
    """A function that is called."""
    return _row(
        f"def f(x):\n    return [y * {number} for y in range(x)]",
        {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [[0], [0, number], [0, number, 2 * number]]},
    )


def standard_input(number: int) -> RewardRequest:
    """A program that reads and prints."""
    inputs = ["1 2\n", "3 4\n", "5 6\n"]
    outputs = [f"{sum(map(int, text.split())) * number}\n" for text in inputs]
    return _row(f"print(sum(map(int, input().split())) * {number})", {"inputs": inputs, "outputs": outputs})


def assertions(number: int) -> RewardRequest:
    """A function with assertions."""
    return _row(f"def f(x):\n    return x * {number}", [f"assert f({x}) == {x * number}" for x in range(NUM_TESTS)])


def pytest_functions(number: int) -> RewardRequest:
    """A function with functions that pytest collects."""
    return _row(f"def f(x):\n    return x * {number}", _functions(number))


def pytest_separate_process(number: int) -> RewardRequest:
    """The same, with a program that must have a process of its own."""
    return _row(f"import gc\n\ndef f(x):\n    return x * {number}", _functions(number))


def unittest_case(number: int) -> RewardRequest:
    """A function with a case of unittest."""
    methods = [f"    def test_{x}(self):\n        self.assertEqual(f({x}), {x * number})" for x in range(NUM_TESTS)]
    text = "import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n" + "\n".join(methods)
    return _row(f"def f(x):\n    return x * {number}", text)


def _functions(number: int) -> str:
    tests = [f"def test_{x}():\n    assert f({x}) == {x * number}" for x in range(NUM_TESTS)]
    return "from solution import f\n" + "\n".join(tests)


KINDS: dict[str, Callable[[int], RewardRequest]] = {
    "calls": calls, "standard_input": standard_input, "assertions": assertions, "pytest_functions": pytest_functions,
    "pytest_separate_process": pytest_separate_process, "unittest_case": unittest_case,
}  # fmt: skip


def _row(source: str, tests: Any, **columns: Any) -> RewardRequest:
    return RewardRequest(
        response=f"So:\n```python\n{source}\n```", columns_json=json.dumps({"tests": tests, **columns})
    )


def measure(options: Options) -> dict[str, Any]:
    """Programs a second by kind, and the cost of one that hangs."""
    rng = random.Random(0)
    rates: dict[str, list[float]] = {name: [] for name in KINDS}
    cpu_rates: dict[str, list[float]] = {name: [] for name in KINDS}
    costs = []
    limit = {"num_workers": options.num_workers, "timeout_s": options.timeout_s, "sandbox": options.sandbox}
    with RewardPool(RewardConfig(function=SHARE, **limit)) as pool:
        pool.grade([calls(number) for number in range(2 * options.num_workers)])  # starts the sandboxes
        for _ in range(options.rounds):
            for name, make in KINDS.items():
                rows = [make(rng.randint(2, 10**6)) for _ in range(options.programs)]
                before = cpu_seconds(pool)
                seconds = graded(pool, rows)
                rates[name].append(len(rows) / seconds)
                cpu_rates[name].append(len(rows) / (cpu_seconds(pool) - before))
            rows = [calls(number) for number in range(20)]
            without = graded(pool, rows)
            hanging = _row(
                "def f(x):\n    while True: pass",
                {"fn_name": "f", "inputs": [[1]] * 10, "outputs": [1] * 10},
                time_limit=options.hanging_test_s,
            )
            start = time.perf_counter()
            [verdict, *_] = pool.grade([hanging, *rows])
            costs.append(time.perf_counter() - start - without)
            assert verdict.reward == 0.0, verdict
    return {
        "programs_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "programs_per_cpu_s": {name: round(statistics.median(values), 1) for name, values in cpu_rates.items()},
        "hanging_program": {"limit_s": options.hanging_test_s, "cost_s": round(statistics.median(costs), 2)},
    }


def graded(pool: RewardPool, rows: list[RewardRequest]) -> float:
    """Seconds for rows that all pass."""
    start = time.perf_counter()
    verdicts = pool.grade(rows)
    seconds = time.perf_counter() - start
    wrong = [verdict for verdict in verdicts if verdict.reward != 1.0]
    assert not wrong, wrong[0]
    return seconds


def cpu_seconds(pool: RewardPool) -> float:
    """Of all workers and sandboxes so far, the programs that have ended included."""
    workers = [one for pid in pool.process_ids for one in psutil.Process(pid).children(recursive=True)]
    return sum(sum(worker.cpu_times()[:4]) for worker in workers)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    result = {
        "options": asdict(options) | {"json": ""},
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()},
        **measure(options),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
