"""``--preflight``: the same job with the checks in the run's place."""

import pytest

from gtpo_megatron.errors import ConfigError
from launchers.checks import check_job
from launchers.job_folder import job_folder, settings
from tests.unit.launchers.jobs import tiny_options


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


def test_a_chain_of_preflights_is_refused(tmp_path):
    options = tiny_options("--preflight", "--chain", "2", run_dir=tmp_path)
    with pytest.raises(ConfigError, match="--preflight --chain 2: a preflight is one job"):
        options.check()
