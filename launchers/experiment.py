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
        The jobs' ids, in the order in which they will run.

    Raises:
        WorkerError: sbatch refused.
    """
    run = _nemo_run(job)
    from invoke.exceptions import UnexpectedExit

    experiment = _experiment(run, job)
    with experiment:
        for number in range(options.chain):
            name = f"train-{number}" if options.chain > 1 else "train"
            _add_job(run, experiment, job, options, name=name, place=number + 1)
        try:
            experiment.run(detach=True)
        except UnexpectedExit as error:
            said = (error.result.stderr or error.result.stdout).strip().splitlines()
            raise WorkerError(f"sbatch refused the job: {said[-1] if said else error}") from error
        return tuple(str(task.handle).rstrip("/").rpartition("/")[2] for task in experiment.jobs)


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
        gpus_per_node=options.gpus_per_node or None,
        cpus_per_task=options.cpus_per_task or None,
        mem=options.mem or None,
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
