"""Submits a run to Slurm and waits for it.

``python -m launchers.slurm RECIPE --nodes N --account A --partition P [options] [--any.field VALUE ...]``
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from gtpo_megatron.cli.recipe import parse
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.config.sft import SftConfig
from gtpo_megatron.errors import ConfigError, GTPOError, WorkerError
from gtpo_megatron.orchestration.on_ray.placement import Placement
from launchers.checks import check_job
from launchers.job_folder import DRY_RUN, JobFolder, job_folder, write_job_folder
from launchers.job_state import GOOD, JobState, wait_for
from launchers.options import SlurmOptions

PROGRAM = "python -m launchers.slurm"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
FINISHED_FILE, GIVEN_UP_FILE = "finished", "given_up"
"""Files of the batch script, in the submission's folder."""

PREFLIGHT_FOLDER = "preflight"
"""Of the report of a preflight, in the run folder; node.sh has the same name."""

TEST_TIMEOUT_S = 60.0

OVERRULING = ("SBATCH_", "SLURM_", "SRUN_")
"""Begin the variables that sbatch takes before the options in a batch script, and those that srun takes within a job:
sbatch hands the shell's on to it, such as an interactive job's ``SLURM_MEM_PER_CPU``."""

CLUSTERS_OWN = frozenset(
    {
        *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS"),
        *("SLURM_JWT", "SLURM_SACK_SOCKET", "SLURM_SACK_KEY", "SLURM_SACK_JWKS"),
    }
)
"""Of these, by which all of Slurm's commands find their cluster and sign in; the wait for the job's end needs them."""

NAMED_VARIABLES = 8
"""At most, in a remark: an interactive job has fifty."""


def main() -> None:
    """Entry of ``python -m launchers.slurm``."""
    sys.path.insert(0, str(Path.cwd()))
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Returns status 0 for a finished run, or for a dry run without errors."""
    try:
        return launch(parse("", SlurmOptions, arguments, program=PROGRAM))
    except ConfigError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (GTPOError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_FAILED


def launch(options: SlurmOptions) -> int:
    """Checks, writes and submits the job, and waits for it."""
    if not options.dry_run and shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch on this machine; run this where you submit jobs, or add --dry-run")
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    submission = DRY_RUN if options.dry_run else f"preflight-{stamp}" if options.preflight else stamp
    job = job_folder(options, submission=submission)
    checked = check_job(job, options)
    remarks = [*checked.remarks, *_drop_overruling_variables()]
    layout = layout_text(options, checked.placement)
    write_job_folder(job, options, layout=layout, memory=checked.memory.text)
    from launchers.experiment import batch_script, submit  # takes seconds, so options are checked first

    script = batch_script(job, options)
    print(layout, end="")
    for remark in remarks:
        print(f"remark   {remark}")
    if options.dry_run:
        print(f"written  {job.folder}: nothing was submitted")
        return 0
    _check_with_slurm(script)
    job_ids = submit(job, options)
    print(f"jobs     {', '.join(job_ids)}")
    print(f"logs     {job.logs}")
    if options.preflight:
        print(f"report   {job.run_dir / PREFLIGHT_FOLDER}")
    else:
        print(f"status   gtpo-megatron status {job.run_dir}")
    if options.detach:
        return 0
    return _wait(job, job_ids, is_preflight=options.preflight)


def _drop_overruling_variables() -> list[str]:
    """Takes from this process, and so from every sbatch, what would overrule the job; returns a remark that names it.

    A login script's SBATCH_PARTITION would send the job elsewhere than its options and the checks say.
    """
    names = sorted(name for name in os.environ if name.startswith(OVERRULING) and name not in CLUSTERS_OWN)
    for name in names:
        del os.environ[name]
    if not names:
        return []
    more = len(names) - NAMED_VARIABLES
    named = ", ".join(names[:NAMED_VARIABLES]) + (f" and {more} more" if more > 0 else "")
    return [
        f"{named} of this shell would overrule the job's options, and {'is' if len(names) == 1 else 'are'} not passed "
        f"on: --sbatch name=value"
    ]


def _check_with_slurm(script: Path) -> None:
    """Asks Slurm whether it accepts the job: account, partition, sizes, limits.

    Raises:
        ConfigError: it does not.
    """
    try:
        answer = subprocess.run(
            ["sbatch", "--test-only", str(script)], capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"sbatch has not answered within {TEST_TIMEOUT_S:.0f} s; is the controller up?") from error
    if answer.returncode:
        said = [line.strip() for line in answer.stderr.replace("sbatch: error: ", "").splitlines() if line.strip()]
        raise ConfigError(f"Slurm would refuse the job: {'; '.join(said)}")


def _wait(job: JobFolder, job_ids: Sequence[str], *, is_preflight: bool = False) -> int:
    print("waiting for the end; Ctrl-C leaves the job alone")
    try:
        state, left = _last_state(job, job_ids)
    except KeyboardInterrupt:
        print(f"\nstill in the queue: squeue -j {','.join(job_ids)}; scancel {' '.join(job_ids)} ends it")
        return EXIT_INTERRUPTED
    if left:
        print(f"jobs {', '.join(left)} of the chain have nothing left to do: scancel {' '.join(left)}")
    if state is not None and state.name == GOOD and is_preflight:
        print(f"passed; the report is in {job.run_dir / PREFLIGHT_FOLDER}")
        return 0
    if state is not None and state.name == GOOD:
        print(f"finished; gtpo-megatron report {job.run_dir} draws it")
        return 0
    words = "unknown to Slurm" if state is None else str(state)
    reason = _given_up(job)
    ended = job_ids[len(job_ids) - len(left) - 1]
    raise WorkerError(f"job {ended} is {words}{f': {reason}' if reason else ''}; logs: {job.logs}")


def _last_state(job: JobFolder, job_ids: Sequence[str]) -> tuple[JobState | None, Sequence[str]]:
    """Waits for the jobs of a chain in turn, until one has finished the run or given it up.

    Returns:
        That job's state, and the later jobs, which are not needed.
    """
    state = None
    for number, job_id in enumerate(job_ids, start=1):
        state = wait_for(job_id, print)
        if (job.folder / FINISHED_FILE).exists() or _given_up(job):
            return state, job_ids[number:]
    return state, ()


def _given_up(job: JobFolder) -> str:
    """The reason why the run was given up; empty if it was not."""
    try:
        return (job.folder / GIVEN_UP_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def layout_text(options: SlurmOptions, placement: Placement) -> str:
    """The trainer's axes and the engines, then every node with what is on it."""
    config, rollout = options.config, options.run.rollout
    kind = f"{options.gpus_per_node} GPUs each" if options.gpus_per_node else "no GPUs"
    nodes, trainer = f"nodes    {options.nodes}, {kind}", f"trainer  {config.parallel}"
    if isinstance(config, SftConfig):
        length = f"{config.num_steps} steps" if config.num_steps else f"{config.num_epochs} epochs"
        lines = [f"warm     {config.name}: {length}, {config.data.rows_per_step} conversations a step", nodes, trainer]
    else:
        lines = [
            f"run      {config.name}: {config.num_steps} steps of {config.data.prompts_per_step} prompts x "
            f"{rollout.group_size} responses",
            nodes,
            trainer,
            f"engines  {rollout.num_engines} of tensor_parallel_size={rollout.tensor_parallel_size}{_spread(rollout)}, "
            f"{rollout.placement}",
        ]
    return "\n".join([*lines, *_nodes(options, placement)]) + "\n"


def _nodes(options: SlurmOptions, placement: Placement) -> Iterator[str]:
    shares = options.run.rollout.placement == "colocated" and placement.has_gpus
    for index in range(options.nodes):
        ranks = [rank for rank, node in enumerate(placement.ranks) if node.node_id == str(index)]
        with_nodes = enumerate(placement.engines)
        engines = [engine for engine, nodes in with_nodes if str(index) in {node.node_id for node in nodes}]
        parts = [_numbered("rank", ranks)] if ranks else []
        if engines:
            parts.append(_numbered("engine", engines) + (" on their GPUs" if shares else ""))
        parts += ["driver, rewards" if options.has_engines else "driver"] if index == 0 else []
        yield f"node {index}   {'; '.join(parts)}"


def _spread(rollout: RolloutConfig) -> str:
    """What an engine has besides tensor parallelism."""
    stages = f" x pipeline_parallel_size={rollout.pipeline_parallel_size}" if rollout.pipeline_parallel_size > 1 else ""
    return f"{stages} on {rollout.nodes_per_engine} nodes" if rollout.nodes_per_engine > 1 else stages


def _numbered(name: str, indices: Sequence[int]) -> str:
    return f"{name} {indices[0]}" if len(indices) == 1 else f"{name}s {indices[0]}-{indices[-1]}"


if __name__ == "__main__":
    main()
