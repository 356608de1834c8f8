"""What the batch script makes of a driver's end, with a stand-in for srun and scontrol."""

import fcntl
import shlex
import signal
import subprocess
import time

import pytest

from launchers.job_folder import SCRIPTS

SRUN = """\
#!/bin/bash
# does what the test wants the whole step to do
[[ -z $CHECKPOINT ]] || { mkdir -p "$RUN_DIR/checkpoints" && echo "$CHECKPOINT" > "$RUN_DIR/checkpoints/latest"; }
if [[ -n $WAIT_FOR_STOP ]]; then
  touch "$LAUNCH_DIR/waiting"
  until [[ -e $RUN_DIR/stop_requested ]]; do sleep 0.05; done
  cp "$RUN_DIR/stop_requested" "$LAUNCH_DIR/asked"
fi
[[ -z $NAP ]] || { touch "$LAUNCH_DIR/napping" && sleep "$NAP"; }
[[ -z $TOLD ]] || touch "$LAUNCH_DIR/told.7.${SLURM_RESTART_COUNT:-0}"
[[ -z $DRIVER_STATUS ]] || echo "$DRIVER_STATUS" > "$LAUNCH_DIR/ended.7.${SLURM_RESTART_COUNT:-0}"
exit "${SRUN_STATUS:-${DRIVER_STATUS:-0}}"
"""

SCONTROL = """\
#!/bin/bash
if [[ $1 == show ]]; then
  [[ $SLURM_TIME_FORMAT == standard ]] || exit 1
  echo "JobId=7 JobState=RUNNING StartTime=2026-05-01T10:00:00 PreemptEligibleTime=2026-05-01T10:00:00" \\
    "PreemptTime=${PREEMPTED:-None} SuspendTime=None"
else
  echo "$@" >> "$LAUNCH_DIR/scontrol"
fi
"""
BEFORE, DURING = "2026-05-01T09:00:00", "2026-05-01T11:00:00"


@pytest.fixture
def job(tmp_path):
    """Starts the batch script's part of ours; variables steer the stand-in."""
    run_dir, launch, bin_dir = tmp_path / "run", tmp_path / "launch", tmp_path / "bin"
    for folder in (run_dir, launch, bin_dir):
        folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin_dir / name).write_text(text, encoding="utf-8")
        (bin_dir / name).chmod(0o755)

    def start(*, chain=1, place=1, restarts=3, restart=0, **steering):
        settings = {"RUN_DIR": run_dir, "LAUNCH_DIR": launch, "CHAIN": chain, "RESTARTS": restarts}
        settings["CHAIN_PLACE"] = place
        lines = [f"export {name}={shlex.quote(str(value))}" for name, value in (settings | steering).items()]
        lines += [f"source {SCRIPTS / 'batch.sh'}", "srun --output x bash node.sh", "echo the template goes on"]
        environment = {"PATH": f"{bin_dir}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart)}
        return subprocess.Popen(
            ["bash", "-c", "\n".join(lines)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    start.launch, start.run_dir = launch, run_dir
    return start


def ended(process):
    """Exit status and output."""
    output, _ = process.communicate(timeout=20)
    return process.returncode, output


def until_exists(path):
    """Waits for a file, for 20 s at most."""
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists()


@pytest.fixture
def taken(job):
    """Another process has a run in the folder."""
    with (job.run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def requeued(job):
    return (job.launch / "scontrol").exists()


SAVED = {"CHECKPOINT": "step_4"}
STOPPED = {"DRIVER_STATUS": 75, **SAVED}
ENDS = {
    "a failure after a checkpoint": ({"DRIVER_STATUS": 1, **SAVED}, 1, True, ""),
    "restarts are used up": (
        {"DRIVER_STATUS": 1, **SAVED, "restart": 3},
        *(1, False, "--restarts 3 are used up; the last checkpoint is step_4"),
    ),
    "another job of the chain": (
        {"DRIVER_STATUS": 1, **SAVED, "chain": 2},
        *(1, False, "the next job of the chain goes on"),
    ),
    "the last job of a chain has finished": ({"DRIVER_STATUS": 0, "chain": 2, "place": 2}, 0, False, ""),
    "nodes are killed behind a driver that has ended": ({"DRIVER_STATUS": 0, "SRUN_STATUS": 143}, 0, False, ""),
    "nodes are killed before their driver ends": ({"DRIVER_STATUS": "", "SRUN_STATUS": 9}, 9, True, ""),
    # Slurm's TERM goes to the tasks alone; the batch script hears of it from node.sh, and asks whose it was
    "preempted, and saved in its grace time": ({**STOPPED, "TOLD": 1, "PREEMPTED": DURING}, 75, True, ""),
    "a person sends TERM, as scancel --signal does": (
        {**STOPPED, "TOLD": 1},
        *(75, False, "somebody asked the run to stop"),
    ),
    "an earlier start of the job was preempted": (
        {**STOPPED, "TOLD": 1, "PREEMPTED": BEFORE},
        *(75, False, "somebody asked the run to stop"),
    ),
    # gang scheduling leaves the time of its preemption, but nobody has told the tasks anything
    "a person asks a job that was once suspended": (
        {**STOPPED, "PREEMPTED": DURING},
        *(75, False, "somebody asked the run to stop"),
    ),
    **{
        f"a preflight ends with {status}": (
            {"PREFLIGHT_S": 600, "DRIVER_STATUS": status, **SAVED},
            *(status, False, "the preflight has not passed: "),
        )
        for status in (1, 2, 75)
    },
}
"""What steers the stand-in; the job's status, whether it goes back into the queue, and words of its output."""


@pytest.mark.parametrize("name", ENDS)
def test_what_becomes_of_a_job(job, name):
    steering, status, is_requeued, words = ENDS[name]
    code, output = ended(job(**steering))
    assert (code, requeued(job)) == (status, is_requeued), output
    assert words in output
    if is_requeued:
        assert (job.launch / "scontrol").read_text() == "requeue 7\n"
        assert not (job.launch / "given_up").exists()
    if "preflight" in name:
        assert "preflight/preflight.html" in (job.launch / "given_up").read_text()


def test_a_finished_run_ends_the_chain(job):
    assert ended(job(DRIVER_STATUS=0))[0] == 0
    status, output = ended(job(DRIVER_STATUS=1))
    assert (status, "finished already" in output) == (0, True)
    assert not requeued(job)


@pytest.mark.parametrize("status", [2, 90, 91, 95])
def test_what_would_end_in_the_same_way_is_not_started_again(job, status):
    code, output = ended(job(DRIVER_STATUS=status))
    assert (code, requeued(job)) == (status, False)
    assert "would end in the same way" in output
    code, output = ended(job(DRIVER_STATUS=0))
    assert code == 1
    assert "an earlier job of this chain has ended it" in output


@pytest.mark.parametrize("status", [2, 90, 91, 95])
def test_what_has_worked_once_may_work_again(job, status):
    """A folder that a lost node still holds, a disk that is full, a GPU that is missing: seen hours into a run."""
    assert ended(job(DRIVER_STATUS=1, CHECKPOINT="step_4"))[0] == 1
    (job.launch / "scontrol").unlink()
    assert ended(job(DRIVER_STATUS=status, restart=1))[0] == status
    assert requeued(job)
    (job.launch / "scontrol").unlink()
    code, output = ended(job(DRIVER_STATUS=status, restart=2))
    assert (code, requeued(job)) == (status, False)
    assert f"failed twice since the last checkpoint (step_4), now with status {status}" in output


def test_the_second_failure_in_one_place_is_the_last(job):
    assert ended(job(DRIVER_STATUS=1))[0] == 1
    assert requeued(job), "the first may have been a lost node"
    (job.launch / "scontrol").unlink()
    code, output = ended(job(DRIVER_STATUS=1, restart=1))
    assert (code, requeued(job)) == (1, False)
    assert "failed twice since the last checkpoint (none)" in output


@pytest.mark.parametrize("status", [1, 75])
def test_the_last_job_of_a_chain_says_that_it_was(job, status):
    process = job(DRIVER_STATUS=status, CHECKPOINT="step_4", chain=2, place=2, WAIT_FOR_STOP=1)
    until_exists(job.launch / "waiting")
    process.send_signal(signal.SIGUSR1)
    code, output = ended(process)
    assert (code, requeued(job)) == (status, False)
    assert "it was the last of --chain 2; the last checkpoint is step_4, submit it again" in output
    assert (job.launch / "given_up").read_text() in output


def test_the_warning_becomes_a_file_and_the_job_goes_on_later(job):
    (job.run_dir / "stop_requested").write_text("left over from another job", encoding="utf-8")
    process = job(DRIVER_STATUS=75, CHECKPOINT="step_4", WAIT_FOR_STOP=1)
    until_exists(job.launch / "waiting")
    assert process.poll() is None, "the left-over request is not this job's"
    process.send_signal(signal.SIGUSR1)
    assert ended(process)[0] == 75
    assert (job.launch / "asked").read_text() == "signal from the batch system\n"
    assert requeued(job)


@pytest.mark.usefixtures("taken")
def test_a_request_to_a_run_that_goes_on_is_left_to_it(job):
    request = job.run_dir / "stop_requested"
    request.write_text("to the other one", encoding="utf-8")
    assert ended(job(DRIVER_STATUS=2))[0] == 2
    assert request.read_text() == "to the other one"


def test_a_preflight_leaves_a_request_alone(job):
    (job.run_dir / "stop_requested").touch()
    assert ended(job(PREFLIGHT_S=600, DRIVER_STATUS=0))[0] == 0
    assert (job.run_dir / "stop_requested").exists()


def test_checkpoints_of_another_process_are_no_progress_of_this_job(job, taken):
    """Once it may be a node that was lost, whose lock lasts a while; what goes on for longer is another run."""
    assert ended(job(DRIVER_STATUS=2, CHECKPOINT="step_4"))[0] == 2
    assert requeued(job)
    (job.launch / "scontrol").unlink()
    code, output = ended(job(DRIVER_STATUS=2, CHECKPOINT="step_8", restart=1))
    assert (code, requeued(job)) == (2, False)
    assert "it has failed twice while another process had the run folder, now with status 2" in output
    (job.launch / "given_up").unlink()
    fcntl.flock(taken, fcntl.LOCK_UN)
    assert ended(job(DRIVER_STATUS=1, CHECKPOINT="step_12", restart=2))[0] == 1
    assert requeued(job)


def test_a_preflight_that_has_passed_is_finished(job):
    assert ended(job(PREFLIGHT_S=600, DRIVER_STATUS=0))[0] == 0
    assert (job.launch / "finished").exists()
    assert not requeued(job)


def test_a_preflight_is_not_asked_to_save(job):
    """The warning's file in the run folder would be the next run's."""
    process = job(PREFLIGHT_S=600, DRIVER_STATUS=0, NAP=1)
    until_exists(job.launch / "napping")
    process.send_signal(signal.SIGUSR1)
    assert ended(process)[0] == 0
    assert not (job.run_dir / "stop_requested").exists()


def test_a_limit_shorter_than_a_step_is_said(job):
    process = job(DRIVER_STATUS=75, WAIT_FOR_STOP=1)
    until_exists(job.launch / "waiting")
    process.send_signal(signal.SIGUSR1)
    code, output = ended(process)
    assert (code, requeued(job)) == (75, False)
    assert "the time limit ends before a step, or a measurement, is done; ask for more with --time" in output


def test_a_cancelled_job_decides_nothing(job):
    """scancel's TERM goes to the batch script too, while the driver may still save."""
    process = job(DRIVER_STATUS=75, CHECKPOINT="step_4", TOLD=1, WAIT_FOR_STOP=1)
    until_exists(job.launch / "waiting")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM
    (job.run_dir / "stop_requested").touch()  # the driver ends only now
    until_exists(job.launch / "ended.7.0")
    assert ended(process) == (-signal.SIGTERM, "")
    assert not requeued(job)
    assert not (job.launch / "given_up").exists()


@pytest.mark.parametrize("status", [75, 143])
def test_preemption_before_a_checkpoint_is_nobodys_fault(job, status):
    """Once, twice, in one place: not a failure, and not too short a limit."""
    for restart in range(2):
        assert ended(job(DRIVER_STATUS=status, TOLD=1, PREEMPTED=DURING, restart=restart))[0] == status
        assert requeued(job)
        (job.launch / "scontrol").unlink()


def test_the_warning_of_a_preemption_is_no_time_limit(job):
    """Where the site has ``send_user_signal``, USR1 comes to the batch script instead."""
    process = job(DRIVER_STATUS=75, WAIT_FOR_STOP=1, PREEMPTED=DURING)
    until_exists(job.launch / "waiting")
    process.send_signal(signal.SIGUSR1)
    assert ended(process)[0] == 75
    assert requeued(job)
