"""What launching costs: the dry run of the 32B recipe, a job's way to its first step, and a restart's to the next one.

``python -m benchmarks.launch --output launch.json`` starts a Slurm of two nodes on this machine (root; see
``tools/local_slurm.sh``). The same run without Slurm is timed beside it, from the same command line, so that loading
Megatron and vLLM, which both do, drops out of the difference.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from tests.slurm.cluster import REPOSITORY, Slurm, step_of

TARGETS = {"dry_run_s": 5.0, "slurm_extra_s": 60.0, "restart_s": 60.0}
"""Upper bounds."""

DRY_RUN = ["recipes.qwen2_5_32b:gtpo_64gpu", "--nodes", "8", "--account", "team", "--partition", "batch", "--dry-run"]
RUN = [
    *("--parallel.tensor-parallel-size", "1", "--data.prompts-per-step", "4", "--rollout.group-size", "4"),
    *("--evaluation.num-problems", "2", "--evaluation.samples", "1", "--evaluation.every-steps", "0"),
    *("--checkpoint.every-steps", "1", "--checkpoint.no-export-hf", "--cluster.num-cpus", "2"),
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        rounds: of the dry run; of the two runs there is one each.
        dry_run_only: leave the runs out; needs no Slurm and no root.
    """

    output: Path
    rounds: int = 5
    dry_run_only: bool = False


def dry_run_s(folder: Path, rounds: int) -> list[float]:
    """Wall time of the whole command."""
    seconds = []
    for number in range(rounds):
        start = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "launchers.slurm", *DRY_RUN, "--run-dir", str(folder / f"dry-{number}")],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        seconds.append(time.monotonic() - start)
    return seconds


def without_slurm_s(folder: Path) -> float:
    """From the command to the row of the first step."""
    run_dir = folder / "plain"
    command = [sys.executable, "-m", "gtpo_megatron.cli", "train", "recipes.tiny_cpu:gtpo", "--num-steps", "1"]
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, "--run-dir", str(run_dir), *RUN],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while step_of(run_dir) < 1:
        if process.poll() not in (None, 0):
            raise SystemExit(f"the run without Slurm ended with {process.returncode}; see {run_dir / 'log.txt'}")
        time.sleep(0.1)
    seconds = time.monotonic() - start
    process.wait()
    return seconds


def with_slurm_s(slurm: Slurm) -> dict[str, float]:
    """From the command to the first step, and from the restarted job's start to the step after its checkpoint."""
    start = time.monotonic()
    launch = slurm.launch("job", *RUN, num_steps=200)
    launch.until("the first step", lambda: launch.step >= 1)
    first_s = time.monotonic() - start
    subprocess.run(["scancel", "--batch", "--signal=USR1", launch.job_id], check=True)
    launch.until_restart(1)
    restart, saved = time.monotonic(), launch.saved_step
    launch.until("a step after the restart", lambda: launch.step > saved)
    restart_s = time.monotonic() - restart
    subprocess.run(["scancel", launch.job_id], check=True)
    launch.wait()
    return {"first_step_s": first_s, "restart_s": restart_s}


def main(options: Options) -> None:
    """Runs what is asked for and writes the figures."""
    if options.dry_run_only:
        with tempfile.TemporaryDirectory() as folder:
            seconds = dry_run_s(Path(folder), options.rounds)
        write(options.output, {"dry_run_all_s": seconds}, {"dry_run_s": statistics.median(seconds)})
        return
    shared = Path(tempfile.mkdtemp(prefix="gs", dir="/var/tmp"))  # not /tmp, which every node has its own of
    slurm = Slurm(shared)
    try:
        dry = dry_run_s(shared, options.rounds)
        plain_s = without_slurm_s(shared)
        started = slurm("start", "2")
        if started.returncode:
            raise SystemExit(started.stderr)
        os.environ["SLURM_CONF"] = str(slurm.conf)
        job = with_slurm_s(slurm)
    finally:
        slurm.end()
        shutil.rmtree(shared, ignore_errors=True)
    measured = {
        "dry_run_s": statistics.median(dry),
        "slurm_extra_s": job["first_step_s"] - plain_s,
        "restart_s": job["restart_s"],
    }
    details = {
        "dry_run_all_s": dry,
        "first_step_without_slurm_s": plain_s,
        "first_step_with_slurm_s": job["first_step_s"],
    }
    write(options.output, details, measured)


def write(output: Path, details: dict[str, object], measured: dict[str, float]) -> None:
    """The figures as JSON, to a file and the screen."""
    result = {
        "machine": {"cpus": os.cpu_count(), "load_average": os.getloadavg()[0], "platform": platform.platform()},
        **details,
        "measured": measured,
        "targets": {name: TARGETS[name] for name in measured},
        "met": {name: value <= TARGETS[name] for name, value in measured.items()},
    }
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options))
