"""The folder of one submission with all files that the job reads.

::

    RUN/launch/NAME/   config.yaml  settings.sh  sbatch.sh  batch.sh  node.sh  node_network.py
                       layout.txt  memory.txt
    RUN/logs/          output of the jobs, one file per job and restart

Scripts and configuration are copies. The package is not: each start of the job imports it from where it is, and says so
if it is at another commit than at the submission.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.run_folder import held_locks
from gtpo_megatron.run_folder.folder import no_locks
from gtpo_megatron.run_folder.provenance import commit
from launchers.named_files import named_files
from launchers.options import SlurmOptions
from launchers.own_settings import SCRIPT_NAMES, SCRIPTS, SETTINGS
from launchers.script_values import NEMO_RUN_FOLDER, PLAIN_PATH, quoted

DRY_RUN = "dry-run"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFolder:
    """The folders of a submission.

    Attributes:
        run_dir: folder of the run.
        folder: folder of this submission.
        logs: folder of the logs of all jobs of the run.
        job_name: equal for all submissions to this run folder, which wait for each other by it; a preflight's is
            another one, and waits for preflights.
    """

    run_dir: Path
    folder: Path
    logs: Path
    job_name: str


def job_folder(options: SlurmOptions, *, submission: str) -> JobFolder:
    """The folders of a submission, without creating them.

    Args:
        options: options of the launch.
        submission: name of this submission's folder.
    """
    run_dir = Path(options.run_dir or f"runs/{options.config.name}").absolute()
    digest = hashlib.blake2b(str(run_dir).encode(), digest_size=3).hexdigest()
    return JobFolder(
        run_dir=run_dir,
        folder=run_dir / "launch" / submission,
        logs=run_dir / "logs",
        job_name=f"gtpo-{options.config.name}-{digest}{'-preflight' if options.preflight else ''}",
    )


def write_job_folder(job: JobFolder, options: SlurmOptions, *, layout: str, memory: str) -> None:
    """Writes all files except the batch script into a new folder.

    Raises:
        ConfigError: the run folder cannot be written.
    """
    try:
        shutil.rmtree(job.folder, ignore_errors=True)
        job.folder.mkdir(parents=True)
        job.logs.mkdir(exist_ok=True)
        for name in SCRIPT_NAMES:
            shutil.copyfile(SCRIPTS / name, job.folder / name)
        (job.folder / "config.yaml").write_text(to_yaml(options.config), encoding="utf-8")
        (job.folder / "settings.sh").write_text(settings(job, options), encoding="utf-8")
        (job.folder / "layout.txt").write_text(layout, encoding="utf-8")
        (job.folder / "memory.txt").write_text(memory, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run folder {job.run_dir} cannot be written: {error.strerror}; choose another") from error


def settings(job: JobFolder, options: SlurmOptions) -> str:
    """``settings.sh``: the scripts' settings as shell variables."""
    cluster = options.config.cluster
    variables: dict[str, object] = {
        "RUN_DIR": job.run_dir,
        "LAUNCH_DIR": job.folder,
        "LOG_DIR": job.logs,
        "SUBCOMMAND": options.command,
        "CONFIG": job.folder / "config.yaml",
        "SUBMIT_DIR": Path.cwd(),
        "SUBMIT_COMMIT": commit(),
        "PYTHON": interpreter(options),
        "IMAGE": container_image(options),
        "GPUS_PER_NODE": options.gpus_per_node,
        "RAY_CPUS": cluster.num_cpus,
        "OBJECT_STORE_BYTES": cluster.object_store_mib << 20,
        "RAY_PORT": options.ray_port,
        "NETWORK_INTERFACE": options.network_interface,
        "START_DEADLINE_S": round(cluster.start_deadline_s),
        "RESTARTS": options.restarts,
        "CHAIN": options.chain,
        "PREFLIGHT_S": options.preflight_s if options.preflight else 0,
    }
    lines = [
        "# shellcheck shell=bash disable=SC2034",
        "# Written by python -m launchers.slurm; read by batch.sh and node.sh.",
    ]
    assert variables.keys() | {"JOB_ENV", "PREFLIGHT_SKIP"} == SETTINGS, "what --env may not set"
    lines += [f"{name}={quoted(name, value)}" for name, value in variables.items()]
    skipped = [quoted("--skip", name) for name in options.skip]
    lines.append(f"PREFLIGHT_SKIP=({' '.join(['--skip', *skipped] if skipped else [])})")
    # not exported here, where the scripts would read them: for the processes that they start
    lines.append(f"JOB_ENV=({' '.join(quoted('--env', variable) for variable in options.env)})")
    return "\n".join(lines) + "\n"


def interpreter(options: SlurmOptions) -> str:
    """Python on the nodes: of this environment, or of the image."""
    return options.python or ("python" if options.container else sys.executable)


def container_image(options: SlurmOptions) -> str:
    """The image as pyxis must be told: what is a file here by its whole path, or it would be taken for a registry's."""
    return str(Path(options.container).expanduser().absolute()) if is_image_file(options) else options.container


def is_image_file(options: SlurmOptions) -> bool:
    """A file rather than a name in a registry."""
    return options.container.startswith((".", "/", "~")) or options.container.endswith((".sqsh", ".sif"))


def mounts(job: JobFolder, options: SlurmOptions) -> list[str]:
    """Folders that must be seen inside a container under the names they have outside, and the user's own.

    Raises:
        ConfigError: the name of a folder cannot be written into srun's options.
    """
    wanted = [job.run_dir, Path.cwd()]
    for _, named in named_files(options.config):
        path = Path(os.path.abspath(named))  # noqa: PTH100 - without its `..`, which would seem to be inside the folder
        wanted += [path, *_linked(path)]
    there = [path for path in wanted if path.exists() or path == job.run_dir]
    folders = sorted({path.parent if path.is_file() else path for path in there})
    outermost = [path for path in folders if not any(other in path.parents for other in folders)]
    for path in outermost:
        if not PLAIN_PATH.fullmatch(str(path)):
            raise ConfigError(
                f"{str(path)!r} must be seen inside the container, and srun takes no blanks, commas, colons or other "
                f"special characters in it; use letters, digits and . _ + @ -"
            )
    return [f"{path}:{path}" for path in outermost] + list(options.container_mount)


def _linked(path: Path) -> Iterator[Path]:
    """What a file, or the files of a folder, are links to, under the names that the links give.

    The hub's cache holds a model as links into a folder beside it; they would lead nowhere in a container that has the
    model's folder alone.
    """
    for entry in (path, *(path.iterdir() if path.is_dir() else ())):
        target, seen = entry, set[Path]()
        while target.is_symlink() and target not in seen:
            seen.add(target)
            target = Path(os.path.normpath(target.parent / target.readlink()))
            if target.exists() and (entry != path or target.is_file()):
                yield target


def check_writable(run_dir: Path) -> None:
    """Says so before the job waits in the queue; leaves nothing behind.

    Raises:
        ConfigError: its name cannot be written into a batch script, or neither it nor the nearest folder above it can
            be written, or it has no locks, which a run needs.
    """
    if not PLAIN_PATH.fullmatch(str(run_dir)):
        raise ConfigError(
            f"run folder {str(run_dir)!r}: Slurm and nemo-run take no blanks or special characters in it; use letters, "
            f"digits and . _ + @ -"
        )
    if NEMO_RUN_FOLDER in str(run_dir):
        raise ConfigError(
            f"run folder {str(run_dir)!r}: nemo-run writes a path of its own wherever {NEMO_RUN_FOLDER} stands in a "
            f"script; choose another --run-dir"
        )
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"run folder {run_dir} cannot be written: {there} does not allow it; choose another --run-dir"
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".gtpo-", dir=there) as trial:
            descriptor = held_locks.acquire(Path(trial) / "lock")
            assert descriptor is not None, "nobody else knows the file"
            held_locks.let_go(descriptor)
    except held_locks.NoLockError as error:
        raise ConfigError(no_locks(run_dir, error)) from error
    except OSError as error:
        raise ConfigError(
            f"run folder {run_dir} cannot be written: {there}: {error.strerror}; choose another --run-dir"
        ) from error
