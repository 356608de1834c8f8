"""The folder of a run and its configuration.

::

    config.yaml  data.json  metrics.jsonl  events.out.*  rollouts/  checkpoints/  hf/  report.html  log.txt
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.config.serialize import AnyConfig, difference, load_any, to_yaml
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.run_folder import held_locks
from gtpo_megatron.run_folder import state as run_state
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_metrics
from gtpo_megatron.untrusted.fields import as_kind
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import find_text, printable

DATA_FILE = "data.json"

SHOWN_DIGITS = 16
"""Digits of a hash in messages."""

TRAIN = "train"
"""Name of the training set; held-out sets have the prefix of their metrics: ``eval/aime24``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataContent:
    """The content of a data set.

    Attributes:
        origin: the file, or the hub's repository, commit and split.
        problems: number of problems.
        problems_sha256: digest of their prompts and answers, in order.
    """

    origin: str
    problems: int
    problems_sha256: str

    def __str__(self) -> str:
        """A short form for messages."""
        return f"{self.origin} with problems {self.problems_sha256[:SHOWN_DIGITS]}"


def sizes_by_label(contents: Mapping[str, DataContent]) -> dict[str, int]:
    """Number of problems of each held-out set, by its label."""
    prefix = heldout_name("")
    return {
        name.removeprefix(prefix): content.problems for name, content in contents.items() if name.startswith(prefix)
    }


def heldout_name(label: str) -> str:
    """Name of a held-out set by its label."""
    return f"eval/{label}"


def contents_text(contents: Mapping[str, DataContent]) -> str:
    """The file's text."""
    return json.dumps({name: asdict(content) for name, content in contents.items()}, indent=2) + "\n"


def read_contents(folder: Path) -> dict[str, DataContent]:
    """Reads the file of a run folder; empty if there is none.

    Raises:
        DataError: it cannot be read.
    """
    text = find_text(folder / DATA_FILE)
    if text is None:
        return {}
    place = printable(folder / DATA_FILE)
    found: dict[str, DataContent] = as_kind(parse_json(text, place), dict[str, DataContent], f"{place}: it")
    return found


CONFIG_FILE = "config.yaml"

SAME_NUMBERS = (
    "num_steps:",
    "logging.",
    "checkpoint.",
    *("cluster.address:", "cluster.num_nodes:", "cluster.num_cpus:", "cluster.object_store_mib:"),
    *("cluster.start_deadline_s:", "cluster.stage_deadline_s:"),
    *("weight_sync.transport:", "weight_sync.bucket_mib:", "weight_sync.deadline_s:"),
    *("reward.num_workers:", "environment.num_workers:", "rollout.max_engine_restarts:"),
    "environment.endpoint_interface:",
)
"""Fields that may differ between a run and its continuation, because they do not change the computation."""

LAYOUT = "parallel."
"""Fields that may differ too, but change the last bits: checkpoints load into every layout."""

OTHER_SUMS = (
    *("rollout.num_engines:", "rollout.tensor_parallel_size:", "rollout.expert_parallel:"),
    *("rollout.pipeline_parallel_size:", "rollout.nodes_per_engine:"),
    *("rollout.kv_cache_mib:", "rollout.max_concurrent_sequences:"),
    *("model.recompute:", "model.head_chunk_tokens:", "update.micro_batch_tokens:", "micro_batch_tokens:"),
    *("cluster.threads_per_rank:", "cluster.engine_threads:"),
)
"""As the layout: they say what is computed together. No checkpoint has anything of them, a response's seed depends on
its place in the step alone, and an update divides by the weight of all its tokens, however they are cut."""

OTHER_FORMAT = ("parallel.distributed_optimizer:",)
"""Fields among these that may not differ: the format of the optimizer's state depends on them."""

UNLIMITED = re.compile(r"reward\.num_workers: (0 -> .*|.* -> 0)")
"""A difference among these that there may not be: without grading processes there are no limits of time and memory, so
that other responses have a verdict."""


class RunFolder:
    """One run's folder.

    Attributes:
        other_sums: fields among ``OTHER_SUMS`` that the run had otherwise at its last start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / CONFIG_FILE
        self.hf_folder = path / "hf"
        self.adapter_folder = path / "adapter"
        self.checkpoints = CheckpointFolder(path / "checkpoints")
        self._lock_descriptor: int | None = None
        self._is_tentative = False
        self.other_sums: list[str] = []

    def open(self, config: AnyConfig, *, resume: bool) -> None:
        """Creates the folder for a new run, or checks that it belongs to this run.

        A run that has neither finished a step nor saved a checkpoint, such as one whose start failed, holds nothing to
        go on with: without ``resume`` a new one takes its place.

        Raises:
            ConfigError: it has a run and ``resume`` is False, or another run; or it cannot be written, or locked.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            if self.config_file.exists() and (resume or self._has_progress()):
                self._check_same_run(config, resume=resume)
            else:
                write_file(self.config_file, to_yaml(config))
                self._is_tentative = True
            run_state.record_start(self.path)
        except ConfigError:
            self.close()
            raise
        except held_locks.NoLockError as error:
            raise ConfigError(no_locks(self.path, error)) from error
        except OSError as error:
            self.withdraw()
            self.close()
            raise ConfigError(f"run folder {self.path} cannot be written: {error.strerror}; choose another") from error

    def record_run(self, config: AnyConfig, contents: Mapping[str, DataContent], *, goes_on: bool) -> None:
        """Records configuration and data sets of the run, after all checks have passed.

        Args:
            config: the run's configuration.
            contents: data sets of the run, by name.
            goes_on: the run resumes from a checkpoint, and must have the same held-out problems. The prompt sampler
                compares the training set.

        Raises:
            ConfigError: a held-out set has other problems than before.
        """
        try:
            before = read_contents(self.path) if goes_on else {}
        except DataError as error:
            raise ConfigError(
                f"{error}; it says on which problems the run was measured: bring it back, or remove it, and the run "
                f"goes on without that check"
            ) from error
        changed = [
            f"{name} was {before[name]}, is now {now}"
            for name, now in contents.items()
            if name != TRAIN and name in before and before[name].problems_sha256 != now.problems_sha256
        ]
        if changed:
            raise ConfigError(
                f"run folder {self.path} holds a run that was measured on other problems: {'; '.join(changed)}; bring "
                f"them back, or choose another folder; if the change is meant, remove {self.path / DATA_FILE} first"
            )
        try:
            write_file(self.path / DATA_FILE, contents_text(contents))
            write_file(self.config_file, to_yaml(config))
            self._is_tentative = False
        except OSError as error:
            raise ConfigError(f"run folder {self.path} cannot be written: {error.strerror}; choose another") from error

    def withdraw(self) -> None:
        """Removes the record of a new run that was refused before ``record_run``."""
        if self._is_tentative:
            self._is_tentative = False
            for path in (self.config_file, self.path / run_state.STATE_FILE):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Releases the folder's lock, as the end of this process does."""
        if self._lock_descriptor is not None:
            held_locks.let_go(self._lock_descriptor)
            self._lock_descriptor = None

    def _lock(self) -> None:
        self.close()
        self._lock_descriptor = run_state.acquire(self.path)
        if self._lock_descriptor is None:
            raise ConfigError(f"run folder {self.path} is in use by another process; wait for it or stop it")

    def _check_same_run(self, config: AnyConfig, *, resume: bool) -> None:
        if not resume:
            raise ConfigError(f"run folder {self.path} holds a run already; add --resume to go on, or choose another")
        changes = difference(load_any(self.config_file), config)
        same = SAME_NUMBERS if config.optimizer.schedule == "constant" else SAME_NUMBERS[1:]
        free = (*same, LAYOUT, *OTHER_SUMS)
        forbidden = [
            row
            for row in changes
            if not row.startswith(free) or row.startswith(OTHER_FORMAT) or UNLIMITED.fullmatch(row)
        ]
        if forbidden:
            raise ConfigError(
                f"run folder {self.path} holds a run with another configuration: {'; '.join(forbidden)}; "
                f"go on with the old values, or choose another folder{_of_decay(config, forbidden)}"
                f"{'' if self._has_progress() else ', or leave out --resume: it has not finished a step'}"
            )
        self.other_sums = [row for row in changes if row.startswith(OTHER_SUMS)]

    def _has_progress(self) -> bool:
        """Whether a step is finished or a checkpoint saved; metrics that cannot be read count as such."""
        if self.checkpoints.path.is_dir() and any(self.checkpoints.path.iterdir()):
            return True
        metrics = self.path / METRICS_FILE
        try:
            return metrics.exists() and any(row["step"] > 0 for row in read_metrics(metrics))
        except DataError:
            return True


def no_locks(path: Path, error: held_locks.NoLockError) -> str:
    """The sentence about a run folder on a disk without locks."""
    return (
        f"run folder {path} cannot be locked: {error.strerror}; without a lock two runs could write into it: choose "
        f"another on a file system with locks (Lustre has them if it is mounted with flock)"
    )


def _of_decay(config: AnyConfig, changes: list[str]) -> str:
    """Why the number of steps may not change, if it did."""
    if config.optimizer.schedule == "constant" or not any(row.startswith("num_steps:") for row in changes):
        return ""
    return (
        f" (optimizer.schedule={config.optimizer.schedule!r} decays over the run's steps: with another number the "
        f"learning rate would jump)"
    )
