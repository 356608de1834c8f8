"""The finished runs of a study, in its own folder and in those of other studies."""

from collections.abc import Sequence
from pathlib import Path

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.study.plan import PlannedRun, fingerprint
from gtpo_megatron.study.run_summary import FinishedRun, read_summaries, read_summary


def is_done(planned: PlannedRun, folders: Sequence[Path]) -> bool:
    """True if one of the folders has the summary of this run.

    Raises:
        ConfigError: the first summary of its name is of other settings.
        DataError: it is not a summary.
    """
    for path in (folder / f"{planned.name}.json" for folder in folders):
        if not path.exists():
            continue
        found, wanted = read_summary(path).fingerprint, fingerprint(planned.config)
        if found != wanted:
            raise ConfigError(
                f"{path} is of a run with other settings (fingerprint {found}, now {wanted}); choose another "
                "--output and --runs-dir, or remove the summaries and run folders there"
            )
        return True
    return False


def read_folders(folders: Sequence[Path]) -> list[FinishedRun]:
    """The summaries of all folders; of two with one name, that of the earlier folder.

    Raises:
        DataError: a file is not a summary.
    """
    found: dict[str, FinishedRun] = {}
    for folder in folders:
        for summary in read_summaries(folder):
            found.setdefault(summary.name, summary)
    return sorted(found.values(), key=lambda summary: (summary.arm, summary.seed))


def progress(runs: Sequence[PlannedRun], folders: Sequence[Path]) -> str:
    """How many of the runs are done, without a word about their results; empty if all are.

    Raises:
        ConfigError: as for :func:`is_done`.
        DataError: as for :func:`is_done`.
    """
    done = {planned.name for planned in runs if is_done(planned, folders)}
    if len(done) == len(runs):
        return ""
    seconds = sum(summary.cost.get("training_s", 0.0) for summary in read_folders(folders) if summary.name in done)
    return (
        f"{len(done)} of {len(runs)} runs are done, {len(runs) - len(done)} are missing; those done trained for "
        f"{seconds / 60:.0f} minutes. Table and page are written with the last one"
    )
