"""Writes the batch script with nemo-run and submits it to Slurm."""

import gc
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import WorkerError
from launchers.job_folder import JobFolder, container_image, mounts
from launchers.options import SlurmOptions
from launchers.script_values import quoted

TITLE = "gtpo"


def batch_script(job: JobFolder, options: SlurmOptions) -> Path:
    """Writes ``sbatch.sh`` as it is submitted (the first of a chain), without submitting it."""
    run = _nemo_run(job)
    experiment = _experiment(run, job)
    with experiment:
        _add_job(run, experiment, job, options, name="train", place=1)
        experiment.dryrun(log=False, exist_ok=True, delete_exp_dir=False)
        folder = Path(experiment._exp_dir)
        made = next(folder.glob("*_sbatch.sh"))
        script = made.rename(job.folder / "sbatch.sh")
    shutil.rmtree(job.folder / "experiments")
    return script


def submit(job: JobFolder, options: SlurmOptions) -> tuple[str, ...]:
    """Submits the job, or all jobs of a chain.

    Returns:
        The jobs' ids, in the order in which they will run: each is submitted when the one before it is in the queue.

    Raises:
        WorkerError: sbatch refused one; the message names those that it has taken.
    """
    run = _nemo_run(job)
    from invoke.exceptions import UnexpectedExit

    experiment = _experiment(run, job)
    with experiment:
        digits = len(str(options.chain))
        for place in range(1, options.chain + 1):
            # nemo-run submits them in the order of their names as texts
            name = f"train-{place:0{digits}}" if options.chain > 1 else "train"
            _add_job(run, experiment, job, options, name=name, place=place)
        try:
            experiment.run(detach=True)
        except UnexpectedExit as error:
            said = (error.result.stderr or error.result.stdout).strip().splitlines()
            taken = _ids(experiment)
            left = f"; it has taken {', '.join(taken)}: scancel {' '.join(taken)}" if taken else ""
            raise WorkerError(f"sbatch refused the job: {said[-1] if said else error}{left}") from error
        return _ids(experiment)


def _ids(experiment: Any) -> tuple[str, ...]:
    """Of the jobs that are submitted; sbatch writes ``ID;CLUSTER`` where SLURM_CLUSTERS names one."""
    handles = (str(task.handle) for task in experiment.jobs if task.handle)
    return tuple(handle.rstrip("/").rpartition("/")[2].partition(";")[0] for handle in handles)


def _nemo_run(job: JobFolder) -> Any:
    """Imports nemo-run late, because it takes seconds and reads its home from the environment at import."""
    os.environ["NEMORUN_HOME"] = str(job.folder)
    with warnings.catch_warnings(), _quick_imports():
        warnings.simplefilter("ignore")  # of what nemo-run imports
        import nemo_run

    nemo_run.config.set_nemorun_home(str(job.folder))
    return nemo_run


@contextmanager
def _quick_imports() -> Iterator[None]:
    """Speeds up nemo-run's import threefold: hides torch, which it imports if present, and stops garbage collection."""
    has_torch = "torch" in sys.modules
    if not has_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
    gc.disable()
    try:
        yield
    finally:
        if not has_torch:
            del sys.modules["torch"]
        gc.freeze()  # modules stay
        gc.enable()


def _experiment(run: Any, job: JobFolder) -> Any:
    return run.Experiment(
        TITLE,
        id=f"{TITLE}_job",
        base_dir=str(job.folder),
        log_level="ERROR",
        clean_mode=True,
        enable_goodbye_message=False,
        threadpool_workers=1,  # else the jobs of a chain come into the queue in any order
        skip_status_at_exit=True,
        serialize_metadata_for_scripts=False,
    )


def _add_job(run: Any, experiment: Any, job: JobFolder, options: SlurmOptions, *, name: str, place: int) -> None:
    node_script = run.Script(
        path=str(job.folder / "node.sh"), args=[quoted("launch folder", job.folder / "settings.sh")], entrypoint="bash"
    )
    experiment.add(node_script, executor=_executor(run, job, options, place=place), name=name)


def _executor(run: Any, job: JobFolder, options: SlurmOptions, *, place: int) -> Any:
    further: dict[str, Any] = dict(item.split("=", 1) for item in options.sbatch)
    # jobs of one name run one after the other: two of one run folder would only disturb each other
    further["dependency"] = ",".join(["singleton", *([further["dependency"]] if "dependency" in further else [])])
    settings, batch = (quoted("launch folder", job.folder / name) for name in ("settings.sh", "batch.sh"))
    return run.SlurmExecutor(
        account=options.account,
        partition=options.partition,
        nodes=options.nodes,
        ntasks_per_node=1,
        gpus_per_node=(options.gpus_per_node if options.request_gpus else 0) or None,
        cpus_per_task=options.cpus_per_task or None,
        mem=_memory(options),
        exclusive=options.exclusive or None,
        time=options.time,
        signal=f"B:USR1@{options.stop_before_s}",
        job_details=run.core.execution.slurm.SlurmJobDetails(job_name=job.job_name, folder=str(job.logs)),
        additional_parameters=further or None,
        # Ray assigns cores; a site's default for MPI must not apply
        srun_args=["--cpu-bind=none", "--mpi=none"],
        setup_lines=f"set +vx\nCHAIN_PLACE={place}\nsource {settings}\nsource {batch}",
        container_image=container_image(options) or None,
        container_mounts=mounts(job, options) if options.container else [],
        tunnel=run.LocalTunnel(job_dir=""),
        packager=run.Packager(),  # package and run folder are on a shared disk, or in the image
        poll_estimated_start_time=False,
    )


def _memory(options: SlurmOptions) -> str | None:
    """``--mem``: all of an exclusive node, which has the site's default for a job that asks for none."""
    is_said_otherwise = any(item.lower().replace("_", "-").startswith("mem-per-") for item in options.sbatch)
    return options.mem or ("0" if options.exclusive and not is_said_otherwise else None)
