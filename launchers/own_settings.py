"""Checks of ``--env`` and ``--sbatch``, which must not override the job's own settings."""

import functools
import re
from pathlib import Path

from gtpo_megatron.errors import ConfigError
from launchers.script_values import is_secret

SCRIPTS = Path(__file__).resolve().parent / "job"
SCRIPT_NAMES = ("node.sh", "batch.sh", "node_network.py")
SETTINGS = frozenset(
    {
        *("RUN_DIR", "LAUNCH_DIR", "LOG_DIR", "SUBCOMMAND", "CONFIG", "SUBMIT_DIR", "SUBMIT_COMMIT"),
        *("PYTHON", "IMAGE", "GPUS_PER_NODE", "RAY_CPUS", "OBJECT_STORE_BYTES", "RAY_PORT", "NETWORK_INTERFACE"),
        *("START_DEADLINE_S", "RESTARTS", "CHAIN", "JOB_ENV", "PREFLIGHT_S", "PREFLIGHT_SKIP"),
    }
)
"""Variables of ``settings.sh``."""


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
ASSIGNED = re.compile(r"(?<![\w-])([A-Za-z_]\w*)=")

OWN_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "GTPO_", "RAY_AUTH_", "TORCHX_", "NEMORUN_")
OWN_VARIABLES = frozenset(
    {
        *("CHAIN_PLACE", "RAY_ADDRESS", "RAY_TMPDIR", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "PYTHONUNBUFFERED"),
        *("BASHOPTS", "BASH_VERSINFO", "BASH_ENV", "EUID", "IFS", "PPID", "SHELLOPTS", "UID", "_"),  # bash's
    }
)
ALLOWED = frozenset({"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"})
"""Variables that the scripts set only if the user has not."""

OWN_OPTIONS = {
    "account": "--account",
    "partition": "--partition",
    "nodes": "--nodes",
    "gpus-per-node": "--gpus-per-node",
    "time": "--time",
    "cpus-per-task": "--cpus-per-task",
    "mem": "--mem",
    "exclusive": "--exclusive",
    "signal": "--stop-before-s",
    "job-name": "--name",
    "chdir": "the folder that you stand in",
    "output": "",
    "error": "",
    "open-mode": "",
    "ntasks-per-node": "",
    "ntasks": "",
    "array": "",
    "requeue": "--restarts",
    "no-requeue": "--restarts 0",
    "parsable": "",
    "test-only": "--dry-run",
    "wait": "",
    "wrap": "",
}
"""Options of sbatch that are set otherwise, and by what."""

DEPENDENCY = "dependency"
"""The option that is added to the job's own."""

ABBREVIATIONS = frozenset({"gpus"})
"""Options that are prefixes of others; sbatch accepts any other prefix as an abbreviation."""


def check_env(variables: tuple[str, ...]) -> None:
    """Checks ``NAME=VALUE``: each once, not a secret, not a variable of the job.

    Raises:
        ConfigError: one is not.
    """
    seen = set[str]()
    for variable in variables:
        name, equals, value = variable.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise ConfigError(f"--env {name!r}: must be written NAME=VALUE, in letters, digits and underscores")
        if name in seen:
            raise ConfigError(f"--env {name}: is given twice; which one counts?")
        seen.add(name)
        if name in own_variables() or name.startswith(OWN_PREFIXES):
            raise ConfigError(f"--env {name}: the job sets it itself; choose another name, or the launcher's option")
        if is_secret(name, value):
            raise ConfigError(
                f"--env {name}: looks like a secret, and what is given here is written to the disk; export it in "
                f"the shell that you submit from, Slurm takes the environment along, or name a file that you alone can "
                f"read (mode 600)"
            )


def check_sbatch(options: tuple[str, ...]) -> None:
    """Checks ``name=value``: each once, not an option of the job or the launcher.

    Raises:
        ConfigError: one is not.
    """
    seen = set[str]()
    for option in options:
        name, _, value = option.partition("=")
        if not value or not OPTION.fullmatch(name):
            raise ConfigError(f"--sbatch {name!r}: must be written name=value, without dashes before it")
        name = name.replace("_", "-").lower()
        if name in seen:
            raise ConfigError(f"--sbatch {name}: is given twice; which one counts?")
        seen.add(name)
        own = next((own for own in OWN_OPTIONS if own.startswith(name) and name not in ABBREVIATIONS), "")
        if own:
            instead = OWN_OPTIONS[own]
            raise ConfigError(f"--sbatch {name}: the job sets {own} itself{f'; use {instead}' if instead else ''}")
        if DEPENDENCY.startswith(name) and (name != DEPENDENCY or "?" in value):
            raise ConfigError(
                f"--sbatch {option}: the jobs of a run folder wait for each other too, so this must be written "
                f"{DEPENDENCY}=..., with commas between several, all of which must be fulfilled"
            )
        if "export".startswith(name) and "=" in value:
            raise ConfigError(
                f"--sbatch {name}: values are written to the disk; --env NAME=VALUE takes what is no secret, and for a "
                f"secret give its name alone and export it in the shell that you submit from"
            )


@functools.cache
def own_variables() -> frozenset[str]:
    """All variables that the job's scripts set, found in their text."""
    scripts = [(SCRIPTS / name).read_text(encoding="utf-8") for name in SCRIPT_NAMES if name.endswith(".sh")]
    assigned = {name for text in scripts for name in ASSIGNED.findall(text)}
    return frozenset(assigned | OWN_VARIABLES | SETTINGS) - ALLOWED
