"""How far a plan was from what a preflight measured on the GPUs, as a file that later plans add.

The difference of each phase is of one layout on one kind of GPU. It is added to every layout, as a constant: what the
plan leaves out (workspaces, contexts, communicators) hardly depends on the layout; an error in activations would.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import as_record
from gtpo_megatron.untrusted.json_text import read_json

PHASES = ("generate", "score", "train", "push", "save")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCorrection:
    """Measured minus planned bytes of the fullest GPU, by phase.

    Attributes:
        recipe: name of the measured recipe.
        layout: layout of its trainer.
        gpu: name of the GPUs.
        planned_bytes: plan by phase, without a correction.
        measured_bytes: peak by phase.
    """

    recipe: str
    layout: str
    gpu: str
    planned_bytes: dict[str, int] = field(default_factory=dict)
    measured_bytes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in (("planned_bytes", self.planned_bytes), ("measured_bytes", self.measured_bytes)):
            if unknown := sorted(values.keys() - set(PHASES)):
                raise ConfigError(f"{name}: no phase {unknown[0]!r}; there are {', '.join(PHASES)}")
            if negative := sorted(phase for phase, value in values.items() if value < 0):
                raise ConfigError(f"{name}.{negative[0]}={values[negative[0]]}: must be 0 or more bytes")
        if self.planned_bytes.keys() != self.measured_bytes.keys():
            raise ConfigError(
                f"planned_bytes has {sorted(self.planned_bytes)}, measured_bytes {sorted(self.measured_bytes)}: both "
                f"must have the same phases"
            )

    @property
    def added_bytes(self) -> Mapping[str, int]:
        """By phase, what a plan must add; negative where it had planned too much."""
        return {phase: self.measured_bytes[phase] - planned for phase, planned in self.planned_bytes.items()}


def write_correction(path: Path, correction: PlanCorrection) -> None:
    """Writes the file."""
    write_file(path, json.dumps(asdict(correction), indent=1) + "\n")


def read_correction(path: Path) -> PlanCorrection:
    """Reads a file of ``write_correction``.

    Raises:
        ConfigError: no such file, or something else is in it.
    """
    return as_record(PlanCorrection, read_json(path, error=ConfigError), f"plan correction {path}", ConfigError)
