"""Where each second of a start goes: from the command to the first responses, by phase and by process.

``python -m benchmarks.start --output benchmarks/results/start.json`` (half a minute a round on two quiet cores) trains
a step of ``recipes.tiny_cpu:gtpo`` with a few responses. Seconds of processors are user's and system's, of each process
until the first responses; wall-clock seconds depend on what else the machine does, of which the load tells.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tyro

from gtpo_megatron.rollout.vllm_engine import FIRST_RESPONSES

RECIPE = "recipes.tiny_cpu:gtpo"
SMALL = [
    *("--num-steps", "1", "--data.prompts-per-step", "4", "--rollout.group-size", "4"),
    *("--evaluation.num-problems", "6", "--evaluation.samples", "2", "--checkpoint.no-export-hf"),
]
TARGET_S = 25.0
LOOK_S = 0.2

KINDS = {
    "gcs_server": "Ray's GCS",
    "raylet/raylet": "Ray's raylet",
    "dashboard": "Ray's agents",
    "RuntimeEnvAgent": "Ray's agents",
    "runtime_env/agent": "Ray's agents",
    "_private/": "Ray's other processes",
    "ray::RankProcess": "ranks",
    "ray::RewardProcess": "reward process",
    "ray::EngineProcess": "engine",
    "cli.dispatch": "driver",
    "gtpo-megatron": "driver",
}
"""Kind of a process by a part of its title or command line, the first that fits, as it was seen last."""

SERVERS = {"vllm.entrypoints.llm": "server of engines", "megatron": "server of ranks"}
"""Kind of a server of workers by a module that it imports."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        rounds: starts, one after the other.
        overrides: an option of the training command, once for each.
    """

    output: Path
    rounds: int = 1
    overrides: tyro.conf.UseAppendAction[tuple[str, ...]] = ()


@dataclass(kw_only=True)
class Start:
    """What was seen of a start.

    Attributes:
        begins_s: seconds at which each phase began, by what the command says of it.
        processor_s: seconds of processors of each kind of process.
        first_s: seconds to the first responses.
    """

    begins_s: dict[str, float] = field(default_factory=dict)
    processor_s: dict[str, float] = field(default_factory=dict)
    first_s: float = 0.0

    def phases(self) -> Iterator[tuple[str, float]]:
        """Seconds of each phase."""
        begins = {"the command, its checks and inputs": 0.0, **self.begins_s}
        ends = [*list(begins.values())[1:], self.first_s]
        yield from ((name, end - begin) for (name, begin), end in zip(begins.items(), ends, strict=True))


def kind_of(command: list[str]) -> str:
    """Kind of a process."""
    line = " ".join(command)
    if "worker_servers" in line:
        return next(kind for module, kind in SERVERS.items() if module in line)
    return next((kind for part, kind in KINDS.items() if part in line), "other processes")


def observe(overrides: tuple[str, ...], folder: Path) -> Start:
    """Starts a run, looks at it until its engine has its first responses, and lets it end.

    Raises:
        SystemExit: the run failed.
    """
    start, began = Start(), time.monotonic()
    command = [str(Path(sys.executable).with_name("gtpo-megatron")), "train", RECIPE, "--run-dir", str(folder)]
    errors = folder.with_name("errors.txt")
    with errors.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [*command, *SMALL, *overrides], stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1
        )

    begins_s: dict[str, float] = {}

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.fullmatch(r"\w+: (.+), [\d:]+s?\n", line):
                begins_s.setdefault(found[1], time.monotonic() - began)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    seen: dict[tuple[int, float], tuple[str, float]] = {}
    log, root = folder / "log.txt", psutil.Process(process.pid)
    while not start.first_s:
        if process.poll() is not None:
            last = "".join(errors.read_text(encoding="utf-8").splitlines(keepends=True)[-1:])
            raise SystemExit(f"the run ended with {process.returncode} before it had sampled: {last}")
        with suppress(psutil.Error):
            for one in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    times = one.cpu_times()
                    seen[one.pid, one.create_time()] = (kind_of(one.cmdline()), times.user + times.system)
        if log.exists() and FIRST_RESPONSES in log.read_text(encoding="utf-8"):
            start.first_s = time.monotonic() - began
        time.sleep(LOOK_S)
    processor_s: dict[str, float] = defaultdict(float)
    for kind, seconds in seen.values():
        processor_s[kind] += seconds
    start.processor_s = dict(sorted(processor_s.items(), key=lambda item: -item[1]))
    process.wait()
    reader.join()
    start.begins_s = {name: at for name, at in begins_s.items() if at < start.first_s}
    return start


def table(starts: list[Start]) -> dict[str, Any]:
    """Medians over the starts: seconds of the phases and of the processes, and of all."""
    phases: dict[str, list[float]] = defaultdict(list)
    kinds: dict[str, list[float]] = defaultdict(list)
    for start in starts:
        for name, seconds in start.phases():
            phases[name].append(seconds)
        for name, seconds in start.processor_s.items():
            kinds[name].append(seconds)
    return {
        "phases_s": {name: round(statistics.median(found), 2) for name, found in phases.items()},
        "processor_s": {name: round(statistics.median(found), 2) for name, found in kinds.items()},
        "all_processors_s": round(statistics.median(sum(start.processor_s.values()) for start in starts), 2),
        "first_responses_s": round(statistics.median(start.first_s for start in starts), 2),
        "first_responses_all_s": [round(start.first_s, 2) for start in starts],
    }


def main(options: Options) -> None:
    """Measures, prints the table, writes the JSON."""
    load = os.getloadavg()[0]
    starts = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            starts.append(observe(options.overrides, Path(folder) / "run"))
    result = table(starts)
    for part in ("phases_s", "processor_s"):
        for name, seconds in result[part].items():
            print(f"{part:12} {seconds:8.2f}  {name}")
    result |= {
        "machine": {"cpus": os.cpu_count(), "load_before": load, "platform": platform.platform()},
        "target_s": TARGET_S,
        "met": result["first_responses_s"] <= TARGET_S,
    }
    print(
        f"first responses after {result['first_responses_s']:.1f} s, {result['all_processors_s']:.1f} s of processors"
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options))
