"""What the batch script makes of a driver's end, with a stand-in for srun and scontrol."""

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
[[ -z $DRIVER_STATUS ]] || echo "$DRIVER_STATUS" > "$LAUNCH_DIR/ended.7.${SLURM_RESTART_COUNT:-0}"
exit "${SRUN_STATUS:-${DRIVER_STATUS:-0}}"
"""


@pytest.fixture
def job(tmp_path):
    """Starts the batch script's part of ours; variables steer the stand-in."""
    run_dir, launch, bin_dir = tmp_path / "run", tmp_path / "launch", tmp_path / "bin"
    for folder in (run_dir, launch, bin_dir):
        folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", f'#!/bin/bash\necho "$@" >> {launch}/scontrol\n')):
        (bin_dir / name).write_text(text, encoding="utf-8")
        (bin_dir / name).chmod(0o755)

    def start(*, chain=1, restarts=3, restart=0, **steering):
        settings = {"RUN_DIR": run_dir, "LAUNCH_DIR": launch, "CHAIN": chain, "RESTARTS": restarts}
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


def requeued(job):
    return (job.launch / "scontrol").exists()


def test_a_finished_run_ends_the_chain(job):
    assert ended(job(DRIVER_STATUS=0))[0] == 0
    status, output = ended(job(DRIVER_STATUS=1))
    assert (status, "finished already" in output) == (0, True)
    assert not requeued(job)


def test_the_drivers_status_counts_not_that_of_killed_nodes(job):
    assert ended(job(DRIVER_STATUS=0, SRUN_STATUS=143))[0] == 0
    (job.launch / "finished").unlink()
    assert ended(job(DRIVER_STATUS="", SRUN_STATUS=9))[0] == 9


@pytest.mark.parametrize("status", [2, 90, 91])
def test_what_would_end_in_the_same_way_is_not_started_again(job, status):
    code, output = ended(job(DRIVER_STATUS=status, CHECKPOINT="step_4"))
    assert (code, requeued(job)) == (status, False)
    assert "would end in the same way" in output
    code, output = ended(job(DRIVER_STATUS=0))
    assert code == 1
    assert "an earlier job of this chain has ended it" in output


def test_a_failure_after_a_checkpoint_goes_back_into_the_queue(job):
    assert ended(job(DRIVER_STATUS=1, CHECKPOINT="step_4"))[0] == 1
    assert (job.launch / "scontrol").read_text() == "requeue 7\n"


def test_the_second_failure_in_one_place_is_the_last(job):
    assert ended(job(DRIVER_STATUS=1))[0] == 1
    assert requeued(job), "the first may have been a lost node"
    (job.launch / "scontrol").unlink()
    code, output = ended(job(DRIVER_STATUS=1, restart=1))
    assert (code, requeued(job)) == (1, False)
    assert "failed twice since the last checkpoint (none)" in output


def test_restarts_are_counted(job):
    code, output = ended(job(DRIVER_STATUS=1, CHECKPOINT="step_4", restart=3))
    assert (code, requeued(job)) == (1, False)
    assert "--restarts 3 are used up; the run is saved at step_4" in output


def test_a_job_of_a_chain_leaves_it_to_the_next(job):
    assert ended(job(DRIVER_STATUS=1, CHECKPOINT="step_4", chain=2))[0] == 1
    assert not requeued(job)
    assert ended(job(DRIVER_STATUS=0, chain=2))[0] == 0


def test_the_warning_becomes_a_file_and_the_job_goes_on_later(job):
    (job.run_dir / "stop_requested").write_text("left over from another job", encoding="utf-8")
    process = job(DRIVER_STATUS=75, CHECKPOINT="step_4", WAIT_FOR_STOP=1)
    deadline = time.monotonic() + 20
    while not (job.launch / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None, "the left-over request is not this job's"
    process.send_signal(signal.SIGUSR1)
    assert ended(process)[0] == 75
    assert (job.launch / "asked").read_text() == "signal from the batch system\n"
    assert requeued(job)


def test_a_limit_shorter_than_a_step_is_said(job):
    process = job(DRIVER_STATUS=75, WAIT_FOR_STOP=1)
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR1)
    code, output = ended(process)
    assert (code, requeued(job)) == (75, False)
    assert "the time limit ends before the first step does; ask for more with --time" in output


def test_a_stop_that_the_batch_system_did_not_ask_for_is_final(job):
    code, output = ended(job(DRIVER_STATUS=75, CHECKPOINT="step_4"))
    assert (code, requeued(job)) == (75, False)
    assert "somebody asked the run to stop" in output
