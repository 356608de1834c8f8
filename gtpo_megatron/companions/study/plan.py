"""The plan of a study: arms, seeds, and the outcome that is compared."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from gtpo_megatron.config.named_function import called
from gtpo_megatron.config.reward import JudgeConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import KIND_KEY, to_plain
from gtpo_megatron.errors import ConfigError

MAX_SEED = 10_000
"""Largest valid seed."""
_NAME = re.compile(r"\w[\w.+-]*")


Recipe: TypeAlias = Callable[..., RunConfig]
"""Makes the configuration of one run, from its ``num_steps`` and ``seed``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One method of a study.

    Attributes:
        name: name in files and on the command line.
        label: name in tables and figures.
        about: description in one sentence.
        recipe: recipe of its runs.
    """

    name: str
    label: str
    about: str
    recipe: Recipe

    def run(self, *, num_steps: int, seed: int) -> RunConfig:
        """The configuration of one of its runs.

        Raises:
            ConfigError: its recipe raised.
        """
        config: RunConfig = called(lambda: self.recipe(num_steps=num_steps, seed=seed), self.name, what="arm")
        return config


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedComparison:
    """A comparison that was written down before the runs.

    Attributes:
        method: name of an arm.
        baseline: name of the arm that it is compared with over common seeds.
        is_primary: its p stands by itself; those of all others are corrected together (Holm).
    """

    method: str
    baseline: str
    is_primary: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """A folder or file that must be made before the runs.

    Attributes:
        path: place where it is looked for.
        command: the shell command that makes it.
    """

    path: str
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Several arms under one budget.

    Attributes:
        name: name of the study.
        arms: all arms.
        default_arms: names of the arms that run by default, in the order of the table.
        baseline: name of the arm that the others are compared with.
        num_steps: steps per run.
        num_seeds: number of seeds.
        first_seed: the first one; the others follow it.
        outcome: the compared metric.
        outcome_steps: last steps over which the outcome is averaged; 1: its value after the last.
        comparisons: planned comparisons; the table lists them first.
        alternatives: groups of arms of which one each is chosen: that of the best mean outcome; ties go to the first.
        dose: arms that differ in one number, with that number, ascending; the page draws metrics over it.
        dose_name: name of the number.
        needed: files that must be made before the runs.
    """

    name: str
    arms: tuple[Arm, ...]
    default_arms: tuple[str, ...]
    baseline: str
    num_steps: int
    num_seeds: int = 5
    first_seed: int = 0
    outcome: str = "eval/heldout_mean_at_k"
    outcome_steps: int = 1
    comparisons: tuple[PlannedComparison, ...] = ()
    alternatives: tuple[tuple[str, ...], ...] = ()
    dose: tuple[tuple[str, float], ...] = ()
    dose_name: str = ""
    needed: tuple[Needed, ...] = ()

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"arm {name!r}: its name is that of files and folders: letters, digits and _ . + -, and none of "
                    "the last three first"
                )
        if len(set(names)) < len(names):
            raise ConfigError(f"arms {names}: two have the same name")
        compared = [name for pair in self.comparisons for name in (pair.method, pair.baseline)]
        chosen = [name for group in self.alternatives for name in group]
        for name in (*self.default_arms, self.baseline, *compared, *chosen, *(arm for arm, _ in self.dose)):
            self.arm(name)
        if not 0 <= self.first_seed <= MAX_SEED:
            raise ConfigError(f"first_seed={self.first_seed}: must be from 0 to {MAX_SEED}")
        if not 1 <= self.outcome_steps <= self.num_steps:
            raise ConfigError(f"outcome_steps={self.outcome_steps}: must be from 1 to num_steps, {self.num_steps}")

    @property
    def outcome_time(self) -> str:
        """The steps of the outcome, in words."""
        return f"in the mean over the last {self.outcome_steps} steps" if self.outcome_steps > 1 else "at the last step"

    def arm(self, name: str) -> Arm:
        """The arm with this name.

        Raises:
            ConfigError: there is none.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise ConfigError(f"arm {name!r}: the study {self.name!r} has {', '.join(arm.name for arm in self.arms)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of a study."""

    arm: Arm
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        """Name of its folder and its summary."""
        return f"{self.arm.name}_seed{self.seed}"


def planned_runs(study: Study, arms: Sequence[str], *, num_seeds: int, num_steps: int) -> list[PlannedRun]:
    """All runs, ordered by seed, so that an interrupted study has the same seeds of all arms.

    Args:
        study: the plan.
        arms: names of arms.
        num_seeds: seeds per arm, from the study's first.
        num_steps: steps per run.

    Raises:
        ConfigError: no such arm, no seed, or fewer steps than the outcome is a mean over.
    """
    most = MAX_SEED + 1 - study.first_seed
    if not 1 <= num_seeds <= most:
        raise ConfigError(f"num_seeds={num_seeds}: must be from 1 to {most}, since the largest seed is {MAX_SEED}")
    if num_steps < study.outcome_steps:  # or all runs would be trained, and none have an outcome
        raise ConfigError(
            f"num_steps={num_steps}: the outcome of the study {study.name!r} is a mean over the last "
            f"{study.outcome_steps} steps; a run needs at least as many"
        )
    chosen = [study.arm(name) for name in dict.fromkeys(arms)]
    return [
        PlannedRun(arm=arm, seed=seed, config=arm.run(num_steps=num_steps, seed=seed))
        for seed in range(study.first_seed, study.first_seed + num_seeds)
        for arm in chosen
    ]


def require_needed(study: Study) -> None:
    """Refuses a study of which something is still to be made.

    Raises:
        ConfigError: a path is missing; the message has the command that makes it.
    """
    for one in study.needed:
        if not Path(one.path).exists():
            raise ConfigError(
                f"{one.path} is not there, and every run of {study.name!r} needs it; make it: {one.command}"
            )


def fingerprint(config: RunConfig) -> str:
    """Digest of a configuration without the folders of its paths; 16 hexadecimal digits."""
    return digest(portable(to_plain(config)))


GONE: dict[str, dict[str, Any]] = {
    "DataConfig": {"contamination_ngram_words": 13},
    "GivenLimits": {"mean_nats": 5e-6, "median_nats": 5e-6, "p99_nats": 5e-5, "kl_nats": 1e-9},
    "LoggingConfig": {
        "mlflow_experiment": None,
        "mlflow_uri": "",
        "trackio_project": None,
        "swanlab_project": None,
        "swanlab_mode": "cloud",
    },
    "OptimizerConfig": {"max_skipped_updates": 3},
    "ProfileConfig": {"with_stack": False, "with_memory": False},
    "GTPOConfig": {"weight_source": "entropy", "weight_seed": 0, "shaped_sides": "both"},
    "GRPOSConfig": {"weight_source": "entropy", "weight_seed": 0, "shaped_sides": "both"},
}
"""Options that the files of earlier runs have and configurations lack, by class, with the value that has no effect."""

FORMER_DEFAULTS: dict[str, dict[str, Any]] = {
    "AdapterConfig": {"targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
}
"""Defaults in the files of earlier runs, which said of their models what today's say."""

FORMER_KINDS = {"gtpo_megatron.companions.study.controls:ControlConfig": "GTPOConfig"}
"""The class that had the options of another one, in the files of earlier runs."""


def has_settings(plain: Mapping[str, Any], config: object) -> bool:
    """Whether the :func:`portable` configuration of an earlier run has the settings of this one.

    Options that came later are not in it; the run had none of what they do, and so their defaults. Options that have
    gone (``GONE``) must have had no effect on it.
    """
    own = portable(to_plain(config))
    kind = own[KIND_KEY]
    gone = GONE.get(kind, {})
    for name, value in plain.items():
        if name == KIND_KEY:
            is_alike = value in (kind, FORMER_KINDS.get(kind))
        else:
            is_alike = name in own or (name in gone and gone[name] == value)
        if not is_alike:
            return False
    for field in fields(config):  # type: ignore[arg-type]
        value, found = getattr(config, field.name), plain.get(field.name)
        if field.name not in plain:
            is_alike = value == (field.default if field.default_factory is MISSING else field.default_factory())
        elif isinstance(value, JudgeConfig) and not value.url and isinstance(found, Mapping):
            is_alike = not found.get("url")  # nobody is asked, whatever the options of a judge were
        elif is_dataclass(value) and isinstance(found, Mapping):
            is_alike = has_settings(found, value)
        elif found == FORMER_DEFAULTS.get(kind, {}).get(field.name, MISSING):
            is_alike = value == field.default
        else:
            is_alike = found == own[field.name]
        if not is_alike:
            return False
    return True


def digest(plain: dict[str, Any]) -> str:
    """Digest of a configuration that is :func:`portable`."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def portable(plain: Any) -> Any:
    """Plain values with every absolute path cut to its last part."""
    if isinstance(plain, dict):
        return {key: portable(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [portable(value) for value in plain]
    return PurePath(plain).name if isinstance(plain, str) and PurePath(plain).is_absolute() else plain
