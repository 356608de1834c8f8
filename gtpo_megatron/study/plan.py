"""The plan of a study: arms, seeds, and the outcome that is compared."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import to_plain
from gtpo_megatron.errors import ConfigError


class Recipe(Protocol):
    """Makes the configuration of one run."""

    def __call__(self, *, num_steps: int, seed: int) -> RunConfig:
        """The configuration of a run with these steps and this seed."""
        ...


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Several arms under one budget.

    Attributes:
        name: name of the study.
        arms: all arms.
        default_arms: names of the arms that run by default, in the order of the table.
        baseline: name of the arm that the others are compared with.
        num_steps: steps per run.
        num_seeds: number of seeds: 0, 1, ...
        outcome: the compared metric, at its last step.
    """

    name: str
    arms: tuple[Arm, ...]
    default_arms: tuple[str, ...]
    baseline: str
    num_steps: int
    num_seeds: int = 5
    outcome: str = "eval/heldout_mean_at_k"

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ConfigError(f"arms {names}: two have the same name")
        for name in (*self.default_arms, self.baseline):
            self.arm(name)

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

    Raises:
        ConfigError: no such arm, or no seed.
    """
    if num_seeds < 1:
        raise ConfigError(f"num_seeds={num_seeds}: must be at least 1")
    chosen = [study.arm(name) for name in arms]
    return [
        PlannedRun(arm=arm, seed=seed, config=arm.recipe(num_steps=num_steps, seed=seed))
        for seed in range(num_seeds)
        for arm in chosen
    ]


def fingerprint(config: RunConfig) -> str:
    """Digest of a configuration without the folders of its paths; 16 hexadecimal digits."""
    text = json.dumps(portable(to_plain(config)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def portable(plain: Any) -> Any:
    """Plain values with every absolute path cut to its last part."""
    if isinstance(plain, dict):
        return {key: portable(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [portable(value) for value in plain]
    return PurePath(plain).name if isinstance(plain, str) and PurePath(plain).is_absolute() else plain


Train = Callable[[PlannedRun], bool]
"""Trains one run; False if it was stopped before its end and can be resumed."""
