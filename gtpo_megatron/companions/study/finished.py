"""The finished runs of a study, in its own folder and in those of other studies."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gtpo_megatron.companions.study.plan import Arm, PlannedRun, Study, fingerprint, has_settings
from gtpo_megatron.companions.study.run_summary import FinishedRun
from gtpo_megatron.companions.study.runs_file import RUNS_FILE, read_runs
from gtpo_megatron.errors import ConfigError


def done_runs(runs: Sequence[PlannedRun], folders: Sequence[Path]) -> dict[str, FinishedRun]:
    """Those of the runs that one of the folders has, by name; each as the first folder that has it says.

    Raises:
        ConfigError: one is of other settings there.
        DataError: a folder's file is damaged.
    """
    found: dict[str, tuple[Path, FinishedRun]] = {}
    for folder in reversed(folders):
        found |= {run.name: (folder, run) for run in read_runs(folder)}
    done = {}
    for planned in runs:
        if planned.name not in found:
            continue
        folder, run = found[planned.name]
        if not has_settings(run.config, planned.config):
            raise ConfigError(
                f"{folder / RUNS_FILE}: {planned.name} is of a run with other settings (fingerprint {run.fingerprint}, "
                f"now {fingerprint(planned.config)}); choose another --output and --runs-dir, or remove such lines and "
                "run folders there"
            )
        done[planned.name] = run
    return done


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRuns:
    """The summaries of a study's own folder and of shared ones.

    Attributes:
        runs: runs with the study's settings, by arm and seed; of two with one name, that of the earlier folder.
        own: names of those in the study's own folder.
        others: names of which there are only summaries with other settings: all in the study's own folder, and its
            arms in shared ones.
    """

    runs: list[FinishedRun]
    own: set[str]
    others: set[str]


def find_runs(study: Study, folders: Sequence[Path], *, num_steps: int) -> FoundRuns:
    """Reads all folders, of which the first is the study's own.

    Raises:
        ConfigError: a recipe of an arm fails.
        DataError: a file of runs is damaged.
    """
    found: dict[str, FinishedRun] = {}
    own, others = set(), set()
    for number, folder in enumerate(folders):
        for summary in read_runs(folder):
            arm = next((arm for arm in study.arms if arm.name == summary.arm), None)
            if arm is not None and _is_of(study, arm, summary, num_steps=num_steps):
                found.setdefault(summary.name, summary)
                own |= {summary.name} if number == 0 else set()
            elif arm is not None or number == 0:
                others.add(summary.name)
    runs = sorted(found.values(), key=lambda summary: (summary.arm, summary.seed))
    return FoundRuns(runs=runs, own=own, others=others - found.keys())


def _is_of(study: Study, arm: Arm, summary: FinishedRun, *, num_steps: int) -> bool:
    if summary.seed < study.first_seed:
        return False
    return has_settings(summary.config, arm.run(num_steps=num_steps, seed=summary.seed))


def progress(runs: Sequence[PlannedRun], folders: Sequence[Path]) -> str:
    """How many of the runs are done, without a word about their results; empty if all are.

    Raises:
        ConfigError: as for :func:`done_runs`.
        DataError: as for :func:`done_runs`.
    """
    done = done_runs(runs, folders)
    if len(done) == len(runs):
        return ""
    seconds = sum(run.cost["training_s"] for run in done.values())
    return (
        f"{len(done)} of {len(runs)} runs are done, {len(runs) - len(done)} are missing; those done trained for "
        f"{seconds / 60:.0f} minutes. Table and page are written with the last one"
    )
