"""Dry runs against golden files, scripts that shells accept, no secrets in them, and clear refusals."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.config.serialize import load_any
from gtpo_megatron.errors import WorkerError
from launchers import slurm
from launchers.job_folder import SCRIPTS, job_folder
from launchers.job_state import JobState
from tests.unit.launchers.jobs import ANYWHERE, TINY, tiny_options

pytestmark = pytest.mark.timeout(240)  # nemo-run is imported, in processes of their own

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "launch"
REPOSITORY = Path(__file__).resolve().parents[3]
SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))

JOBS = {
    "tiny": ["recipes.tiny_cpu:gtpo", *ANYWHERE, *TINY, "--restarts", "3", "--network-interface", "eth0"],
    "warm": ["recipes.tiny_cpu:sft", *ANYWHERE, *TINY],
    "paper": [
        *("recipes.qwen2_5_32b:gtpo_64gpu", *ANYWHERE, "--nodes", "8", "--time", "1-0"),
        *("--sbatch", "qos=high", "dependency=afterok:7"),
    ],
    "container": [
        *("recipes.qwen2_5_32b:grpo_s_64gpu", *ANYWHERE, "--nodes", "8", "--chain", "3"),
        *("--no-request-gpus", "--sbatch", "gres=gpu:h100:8"),
        *(
            "--container",
            "registry.example/gtpo:1",
            "--container-mount",
            "/scratch:/scratch",
            "--env",
            "NCCL_DEBUG=WARN",
        ),
    ],
}


@pytest.fixture(scope="module", params=JOBS)
def dry_run(request, tmp_path_factory):
    """Name and folder of a dry run, from any directory, with secrets in the environment."""
    somewhere = tmp_path_factory.mktemp(request.param)
    done = subprocess.run(
        [sys.executable, "-m", "launchers.slurm", *JOBS[request.param], "--run-dir", "runs/mine", "--dry-run"],
        cwd=somewhere,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_TOKEN": "s3cret-value", "WANDB_API_KEY": "s3cret-value"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing was submitted" in done.stdout
    return request.param, somewhere / "runs" / "mine" / "launch" / "dry-run"


def anonymous(text, folder):
    """Without what differs between machines and tests."""
    run_dir = str(folder.parents[1])
    text = text.replace(run_dir, "/RUN").replace(str(folder.parents[3]), "/SUBMIT")
    text = text.replace(sys.executable, "/ENV/bin/python").replace(str(REPOSITORY), "/REPOSITORY")
    text = re.sub(r"(?m)^SUBMIT_COMMIT=.*$", "SUBMIT_COMMIT=HASH", text)
    return re.sub(r"(gtpo-qwen\w+|gtpo-tiny\w+)-[0-9a-f]{6}", r"\1-HASH", text)


@pytest.mark.parametrize("name", ["sbatch.sh", "settings.sh", "layout.txt"])
def test_what_would_be_submitted_is_as_reviewed(dry_run, name, request):
    job, folder = dry_run
    made = anonymous((folder / name).read_text(encoding="utf-8"), folder)
    golden = GOLDEN / f"{job}.{name}"
    if request.config.getoption("--rewrite-golden"):
        golden.write_text(made, encoding="utf-8")
    assert made == golden.read_text(encoding="utf-8")


def test_the_configuration_reloads_and_the_scripts_are_ours(dry_run):
    _, folder = dry_run
    assert load_any(folder / "config.yaml").parallel.num_ranks in (2, 64)
    for name in ("node.sh", "batch.sh", "node_network.py"):
        assert (folder / name).read_bytes() == (SCRIPTS / name).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == [
        *(
            "batch.sh",
            "config.yaml",
            "layout.txt",
            "memory.txt",
            "node.sh",
            "node_network.py",
            "sbatch.sh",
            "settings.sh",
        )
    ]


def test_shells_accept_every_script(dry_run):
    _, folder = dry_run
    for script in sorted(folder.glob("*.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True)
        # nemo-run's own template has warnings
        level = ["--severity=error"] if script.name == "sbatch.sh" else []
        found = subprocess.run([SHELLCHECK, *level, str(script)], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


def test_other_scripts_of_the_repository_too():
    for script in (*REPOSITORY.glob("tools/*.sh"), REPOSITORY / ".ci" / "run"):
        found = subprocess.run([SHELLCHECK, str(script)], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


def test_no_secret_reaches_the_disk(dry_run):
    _, folder = dry_run
    for path in folder.parents[1].rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("file", "states", "waited_for", "message"),
    [
        ("finished", ["COMPLETED"], ["1"], ""),
        ("given_up", ["FAILED"], ["1"], "job 1 is FAILED: not restarted; logs: "),
        ("", ["FAILED", "FAILED", "TIMEOUT"], ["1", "2", "3"], "job 3 is TIMEOUT; logs: "),
        ("", ["TIMEOUT", "FAILED", "COMPLETED"], ["1", "2", "3"], ""),
    ],
)
def test_a_chain_is_waited_for_until_its_end_is_known(tmp_path, monkeypatch, capsys, file, states, waited_for, message):
    """The other jobs would wait for their nodes only to end at once."""
    job, asked, left = job_folder(tiny_options(run_dir=tmp_path), submission="s"), [], iter(states)
    job.folder.mkdir(parents=True)
    if file:
        (job.folder / file).write_text("not restarted\n", encoding="utf-8")
    monkeypatch.setattr(slurm, "wait_for", lambda job_id, _: (asked.append(job_id), JobState(name=next(left)))[1])
    if message:
        with pytest.raises(WorkerError, match=message):
            slurm._wait(job, ["1", "2", "3"])
    else:
        assert slurm._wait(job, ["1", "2", "3"]) == 0
    assert asked == waited_for
    assert ("jobs 2, 3 of the chain have nothing left to do: scancel 2 3" in capsys.readouterr().out) == bool(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a recipe first: python -m launchers.slurm recipes.tiny_cpu:gtpo"),
        (
            ["recipes.tiny_cpu:gpto", *ANYWHERE],
            "recipes.tiny_cpu lacks it; it has code_gtpo, dapo, distill, grpo, grpo_kl, grpo_s, gtpo, gtpo_lora, "
            "moe_gtpo, sft, sft_lora, tool_gtpo; did you mean recipes.tiny_cpu:gtpo?",
        ),
        (["recipes.nowhere:gtpo", *ANYWHERE], "there is no module 'recipes.nowhere'"),
        (["recipes.tiny_cpu:gtpo", "--account", "a", "--dry-run"], "--partition is missing"),
        (["recipes.tiny_cpu:gtpo", *ANYWHERE, *TINY, "--time", "10", "--dry-run"], "--time 10 is 600 s"),
        (
            ["recipes.tiny_cpu:gtpo", *ANYWHERE, *TINY, "--run-dir", "/proc/run", "--dry-run"],
            "run folder /proc/run cannot be written",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert slurm.run(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


OF_AN_INTERACTIVE_JOB = ("CPUS_PER_TASK", "JOB_ID", "MEM_PER_CPU", "MEM_PER_NODE", "NTASKS", "PROCID", "UMASK")


def test_variables_that_would_overrule_the_job_do_not_come_to_sbatch(monkeypatch):
    """sbatch takes the first before the script's own lines, and hands the others on to srun in the job."""
    for name in [name for name in os.environ if name.startswith(slurm.OVERRULING)]:
        monkeypatch.delenv(name)
    stay = {"SLURM_CONF": "/etc/conf", "SLURM_CLUSTERS": "one", "SLURM_JWT": "t0ken", "SLURMD_NODENAME": "node0"}
    for name, value in stay.items():
        monkeypatch.setenv(name, value)
    assert slurm._drop_overruling_variables() == []
    monkeypatch.setenv("SBATCH_TIMELIMIT", "other")
    assert slurm._drop_overruling_variables() == [
        "SBATCH_TIMELIMIT of this shell would overrule the job's options, and is not passed on: --sbatch name=value"
    ]
    for name in ("SBATCH_PARTITION", "SRUN_EXPORT_ENV", *(f"SLURM_{name}" for name in OF_AN_INTERACTIVE_JOB)):
        monkeypatch.setenv(name, "other")
    (remark,) = slurm._drop_overruling_variables()
    assert remark.startswith("SBATCH_PARTITION, SLURM_CPUS_PER_TASK, SLURM_JOB_ID, SLURM_MEM_PER_CPU, ")
    assert "SLURM_UMASK and 1 more of this shell would overrule the job's options, and are not passed on" in remark
    assert {name: value for name, value in os.environ.items() if name.startswith(("SLURM", "SBATCH", "SRUN"))} == stay


def test_without_slurm_only_a_dry_run_works(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm.shutil, "which", lambda _: None)
    arguments = ["recipes.tiny_cpu:gtpo", *ANYWHERE, *TINY, "--run-dir", str(tmp_path / "run")]
    assert slurm.run(arguments) == 2
    assert "there is no sbatch on this machine" in capsys.readouterr().err
