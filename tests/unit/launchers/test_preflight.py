"""``--preflight``: the same job with the checks in the run's place."""

import dataclasses
import io
import os

import pytest

from gtpo_megatron.errors import ConfigError
from launchers import slurm
from launchers.checks import check_job
from launchers.job_folder import job_folder, settings
from tests.unit.launchers.job_run import PYTHON, make_stand_ins, run_batch, write_program
from tests.unit.launchers.jobs import ANYWHERE, TINY, tiny_options


def test_the_scripts_know_what_to_run(tmp_path):
    options = tiny_options("--preflight", "--preflight-s", "300", run_dir=tmp_path)
    job = job_folder(options, submission="s")
    assert "PREFLIGHT_S=300" in settings(job, options).splitlines()
    assert job.job_name.endswith("-preflight"), "jobs of a chain wait for those of their own name"
    plain = tiny_options(run_dir=tmp_path)
    assert "PREFLIGHT_S=0" in settings(job_folder(plain, submission="s"), plain).splitlines()


def test_time_must_be_enough_for_the_checks_not_for_a_step(tmp_path):
    options = tiny_options("--preflight", "--time", "12", run_dir=tmp_path)
    assert check_job(job_folder(options, submission="s"), options).remarks == []
    options = tiny_options("--preflight", "--time", "10", run_dir=tmp_path)
    with pytest.raises(ConfigError, match="--time 10 is 600 s: .* --preflight-s 600; ask for more time"):
        check_job(job_folder(options, submission="s"), options)


def test_checks_that_are_left_out_are_known_ones(tmp_path):
    options = tiny_options("--preflight", "--skip", "network", "sleep", "--time", "20", run_dir=tmp_path)
    job = job_folder(options, submission="s")
    assert check_job(job, options).remarks == []
    assert "PREFLIGHT_SKIP=(--skip network sleep)" in settings(job, options).splitlines()
    with pytest.raises(ConfigError, match="--skip nonet: no such check; there are inputs, "):
        check_job(job, dataclasses.replace(options, skip=("nonet",)))
    with pytest.raises(ConfigError, match="--skip network sleep: a run has no checks to leave out; add --preflight"):
        dataclasses.replace(options, preflight=False).check()


def test_a_chain_of_preflights_is_refused(tmp_path):
    options = tiny_options("--preflight", "--chain", "2", run_dir=tmp_path)
    with pytest.raises(ConfigError, match="--preflight --chain 2: a preflight is one job"):
        options.check()


@pytest.mark.nightly
@pytest.mark.timeout(240)  # nemo-run is imported
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # and leaves files open
def test_the_job_runs_the_preflight_on_its_nodes(tmp_path, monkeypatch, capsys):
    """Submitted to a Slurm that is not there, then run by bash with stand-ins for it and for Python."""
    programs, python = make_stand_ins(tmp_path), tmp_path / "python"
    write_program(python, PYTHON)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nemo-run passes it on
    monkeypatch.setenv("SBATCH_PARTITION", "elsewhere")
    run_dir = tmp_path / "run"
    arguments = ["recipes.tiny_cpu:gtpo", *ANYWHERE, *TINY, "--run-dir", str(run_dir), "--python", str(python)]
    assert slurm.run([*arguments, "--preflight", "--skip", "network", "--time", "20", "--detach"]) == 0
    told = capsys.readouterr().out
    assert f"report   {run_dir / 'preflight'}" in told
    assert "remark   SBATCH_PARTITION of this shell would overrule" in told
    submitted = list((tmp_path / "record").glob("submitted.*"))
    assert len(submitted) == 2, "once to ask, once to submit"
    assert not any(b"SBATCH_" in path.read_bytes() for path in submitted)
    (launch,) = (run_dir / "launch").glob("preflight-*")
    job = run_batch(launch / "sbatch.sh", programs, tmp_path)
    assert job.status == 0, job.output
    (words,) = [words for words in job.calls["python"] if "gtpo_megatron.cli" in words]
    assert words == [
        *("-m", "gtpo_megatron.cli", "preflight", str(launch / "config.yaml")),
        *("--output", str(run_dir / "preflight"), "--seconds", "600", "--skip", "network"),
        *("--cluster.address", "127.0.0.1:6379", "--cluster.num-nodes", "2"),
    ]
    assert (launch / "finished").exists()
    assert not job.calls["scontrol"] or all("requeue" not in words for words in job.calls["scontrol"])
