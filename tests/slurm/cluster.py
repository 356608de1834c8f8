"""A Slurm of two nodes for the tests, and jobs on it that are started, watched and disturbed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gtpo_megatron.observability.metrics import deterministic
from gtpo_megatron.run_folder.metrics_file import read_metrics
from launchers.job_state import JobState, job_state

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tools" / "local_slurm.sh"
PATIENCE_S = 600.0

SMALL = [
    *("--account", "team", "--partition", "batch", "--nodes", "2", "--gpus-per-node", "0", "--no-exclusive"),
    *("--time", "60", "--stop-before-s", "300"),
    "--parallel.tensor-parallel-size",
    "1",  # DP 2: one rank a node; all weights are on the engine's node too
    *("--cluster.num-cpus", "1", "--cluster.start-deadline-s", "400", "--cluster.stage-deadline-s", "300"),
    # two real cores serve everything: Ray must not take a full machine for a leak
    *("--env", "RAY_memory_monitor_refresh_ms=0"),
]
FEW_SAMPLES = [
    *("--data.prompts-per-step", "4", "--rollout.group-size", "4"),
    *("--evaluation.num-problems", "2", "--evaluation.samples", "1", "--evaluation.every-steps", "0"),
]


class Slurm:
    """The daemons."""

    def __init__(self, shared: Path) -> None:
        number = os.getpid() % 200
        self.shared = shared
        self._environment = os.environ | {
            "LOCAL_SLURM_DIR": str(shared / "slurm"),
            "LOCAL_SLURM_NET": f"10.{80 + number // 100}.{100 + number % 100}",
            "LOCAL_SLURM_BRIDGE": f"gs{number}",
        }
        self.conf = shared / "slurm" / "slurm.conf"

        self.launches: list[Launch] = []

    def launch(self, name: str, *overrides: str, recipe: str = "gtpo", num_steps: int = 2) -> "Launch":
        """Starts a launcher of a recipe of ``recipes.tiny_cpu``; ``end`` ends it if it is still there."""
        launch = Launch(self.shared, name, *overrides, recipe=recipe, num_steps=num_steps)
        self.launches.append(launch)
        return launch

    def end(self) -> None:
        """Launchers and daemons, however far a test has come."""
        for launch in self.launches:
            launch.process.kill()
            launch.process.wait(30)
        self("stop")

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess:
        """``tools/local_slurm.sh``."""
        return subprocess.run(
            [str(SCRIPT), *arguments], env=self._environment, capture_output=True, text=True, timeout=90, check=False
        )


def scontrol(*arguments: str) -> subprocess.CompletedProcess:
    """Of the cluster that SLURM_CONF names."""
    return subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=60, check=False)


class Launch:
    """One ``python -m launchers.slurm`` from a directory of its own."""

    def __init__(self, shared: Path, name: str, *overrides: str, recipe: str, num_steps: int) -> None:
        self.run_dir = shared / name
        self._output = shared / f"{name}.out"
        command = [sys.executable, "-m", "launchers.slurm", f"recipes.tiny_cpu:{recipe}", "--run-dir"]
        few = FEW_SAMPLES if recipe == "gtpo" else []
        with self._output.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, str(self.run_dir), *SMALL, *few, "--num-steps", str(num_steps), *overrides],
                cwd=shared,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """What the launcher printed, and the logs of its jobs."""
        logs = sorted((self.run_dir / "logs").glob("*.out")) if (self.run_dir / "logs").exists() else []
        return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in (self._output, *logs))

    @property
    def told(self) -> str:
        """What the launcher printed."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self) -> int:
        """Its exit status."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still waiting:\n{self.output[-6000:]}") from None

    def until(self, what: str, condition: Callable[[], object]) -> None:
        """Waits for something to become true while the launcher waits for its job."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"the launcher ended before {what}:\n{self.output[-6000:]}"
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.output[-6000:]}"
            time.sleep(0.1)

    @property
    def job_id(self) -> str:
        """Of its only job."""
        self.until("the submission", lambda: "\njobs " in f"\n{self.told}")
        return next(line.split()[1] for line in self.told.splitlines() if line.startswith("jobs "))

    @property
    def state(self) -> JobState:
        """As Slurm has it."""
        found = job_state(self.job_id)
        assert found is not None
        return found

    @property
    def step(self) -> int:
        """Last finished step; -1 before there is any."""
        return step_of(self.run_dir)

    @property
    def saved_step(self) -> int:
        """Of the last checkpoint; 0 before there is any."""
        latest = self.run_dir / "checkpoints" / "latest"
        return int(latest.read_text(encoding="utf-8").strip().rpartition("_")[2]) if latest.exists() else 0

    def until_restart(self, number: int) -> None:
        """Waits for the job's next start, for which Slurm takes two minutes.

        They are not spared: messages about the last start are still on their way and would end a next one too.
        """
        self.until(
            "the job to be started again", lambda: self.state.restarts >= number and self.state.name == "RUNNING"
        )

    def processes(self) -> list[str]:
        """Of this job, on any node: whatever carries its mark."""
        mark = f"GTPO_LAUNCH={self.job_id}."
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if any(item.startswith(mark) for item in (path / "environ").read_text(errors="replace").split("\0")):
                    found.append((path / "cmdline").read_text(errors="replace").replace("\0", " ")[:80])
            except OSError:
                continue  # it has just ended
        return found


def step_of(run_dir: Path) -> int:
    """Last finished step; -1 before there is any."""
    path = run_dir / "metrics.jsonl"
    return max((row["step"] for row in read_metrics(path)), default=-1) if path.exists() else -1


def steps(run_dir: Path) -> list[dict]:
    """What a run computed, times and memory aside."""
    return [deterministic(row) for row in read_metrics(run_dir / "metrics.jsonl")]
