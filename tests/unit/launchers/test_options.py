"""What no cluster could do is refused with the option's name."""

import re

import pytest

from gtpo_megatron.errors import ConfigError
from launchers.own_settings import OWN_PREFIXES, SCRIPTS, own_variables
from tests.unit.launchers.jobs import tiny_options, with_options


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--account", " "], "--account is missing"),
        (["--partition", ""], "--partition is missing"),
        (["--nodes", "0"], "--nodes 0: must be 1 or more"),
        (["--gpus-per-node", "-1"], "--gpus-per-node -1"),
        (["--ray-port", "70000"], "--ray-port 70000: must be a port"),
        (["--chain", "0"], "--chain 0"),
        (["--stop-before-s", "0"], "--stop-before-s 0"),
        (["--mem", "lots"], "--mem 'lots': must be a whole number and K, M, G or T"),
        (["--host-memory-gib", "-1"], "--host-memory-gib -1.0: must be 0 or more"),
        (["--sbatch", "qos"], "must be written name=value"),
        (["--env", "NAME"], "must be written NAME=VALUE"),
        (["--env", "MY-NAME=1"], "must be written NAME=VALUE"),
        (["--env", "é=1"], "must be written NAME=VALUE"),
        (["--env", "A=1", "A=2"], "--env A: is given twice"),
        (["--sbatch", "qos=a", "qos=b"], "--sbatch qos: is given twice"),
        (["--sbatch", "qos high=1"], "must be written name=value"),
        (["--python=-c"], "must be the name or path of an interpreter"),
        (["--env", "HF_TOKEN=abc"], "looks like a secret.*export it"),
        (["--env", "WANDB_API_KEY=abc"], "looks like a secret"),
        (["--container-mount", "/a:/b"], "needs --container"),
        (["--container", "x", "--container-mount", "/a"], "must be SOURCE:TARGET"),
        (["--container", "x", "--container-mount", "/my dir:/a"], "takes no blanks, commas or quotes"),
        (["--container", "my image.sqsh"], "takes no blanks, commas or quotes"),
    ],
)
def test_each_mistake_is_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        tiny_options(*overrides).check()


def test_good_options_pass():
    tiny_options("--sbatch", "qos=high", "comment=a=b", "--env", "NCCL_DEBUG=INFO", "X=").check()


@pytest.mark.parametrize(
    ("overrides", "mebibytes"),
    [
        ([], 0),
        (["--mem", "0"], 0),
        (["--mem", "2048"], 2048),
        (["--mem", "3g"], 3072),
        (["--mem", "1T"], 1 << 20),
        (["--host-memory-gib", "1.5"], 1536),
        (["--mem", "0", "--host-memory-gib", "2"], 2048),
    ],
)
def test_memory_of_a_node_as_slurm_writes_it(overrides, mebibytes):
    assert tiny_options(*overrides).host_memory_bytes == mebibytes << 20


OWN = (
    *("RUN_DIR", "LAUNCH_DIR", "LOG_DIR", "CONFIG", "SUBMIT_DIR", "PYTHON", "IMAGE", "GPUS_PER_NODE", "RAY_PORT"),
    *("RESTARTS", "CHAIN", "CHAIN_PLACE", "NODE", "ATTEMPT", "MARK", "HOPELESS", "STOP_FILE", "RAY_LOG", "JOB_ENV"),
    *("RAY_AUTH_MODE", "GTPO_LAUNCH", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_EXPORT_ENV", "SBATCH_ACCOUNT"),
    *("RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "TORCHX_MAX_RETRIES", "BASH_ENV", "SHELLOPTS", "UID"),
)


def test_a_variable_does_not_override_the_jobs_own():
    for name in OWN:
        with pytest.raises(ConfigError, match=f"--env {name}: the job sets it itself"):
            with_options(env=(f"{name}=x",)).check()


def test_whatever_a_script_assigns_is_the_jobs_own():
    """As bash sees it: every variable of the scripts and of ``settings.sh``."""
    for script in SCRIPTS.glob("*.sh"):
        text = script.read_text(encoding="utf-8")
        used = set(re.findall(r"\$\{?#?([A-Z][A-Z_]+)\b", text))
        given = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SECONDS", "BASH_REMATCH"}
        for name in used - given:
            assert name in own_variables() or name.startswith(OWN_PREFIXES), f"{script.name}: {name}"


SET = (
    *("account=x", "nodes=9", "gpus-per-node=1", "time=1", "job-name=x", "job_name=x", "output=/x", "outp=/x"),
    *("error=/x", "signal=TERM", "wrap=true", "array=1-9", "ntasks-per-node=2", "open-mode=truncate", "chdir=/"),
    *("requeue=1", "no-requeue=1", "exclusive=user", "mem=1", "cpus-per-task=1", "o=/x", "JOB-NAME=x"),
)


def test_sbatch_is_not_told_twice():
    for option in SET:
        with pytest.raises(ConfigError, match="the job sets"):
            with_options(sbatch=(option,)).check()


def test_dashes_before_an_option():
    with pytest.raises(ConfigError, match="without dashes before it"):
        with_options(sbatch=("--qos=high",)).check()


@pytest.mark.parametrize("option", ["dep=afterok:7", "dependency=afterok:7?afterok:8"])
def test_dependencies_of_ones_own_are_added_to_that_on_the_run_folder(option):
    tiny_options("--sbatch", "dependency=afterok:7,afterok:8", "--chain", "2").check()
    with pytest.raises(ConfigError, match=r"must be written dependency=\.\.\., with commas between several"):
        tiny_options("--sbatch", option).check()


SECRETS = [
    *(
        "HF_TOKEN=abc",
        "WANDB_API_KEY=abc",
        "PGPASS=abc",
        "PGPASSWORD=abc",
        "MYSQL_PWD=abc",
        "AWS_SECRET_ACCESS_KEY=abc",
    ),
    *("GH_PAT=abc", "sshpass=abc", "Some_Password=abc", "DB_PASS=abc", "NETRC_PASSWD=abc", "SESSION_COOKIE=abc"),
    *("SENTRY_DSN=abc", "MY_CREDS=abc", "GOOGLE_APPLICATION_CREDENTIALS=/nowhere/key.json", "apikey=abc"),
    *("https_proxy=http://me:pass@proxy:3128", "HTTP_PROXY=http://:pass@proxy", "all_proxy=me:pass@proxy:3128"),
    *("DATABASE=postgres://me:pass@host/db", "REMOTE=https://ghp_0123456789abcdef0123@github.com/a/b"),
    *("HEADER=Authorization: Bearer abcdefgh12345", "URL=https://host/?sig=abc", "ARGS=x --y; password=abc"),
    *(
        "X=hf_abcdefghijklmnopqrstuv",
        "X=sk-abcdefghijklmnopqrst",
        "X=AKIAABCDEFGHIJKLMNOP",
        "X=glpat-0123456789abcdefghij",
    ),
    *("X=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc", "X=-----BEGIN OPENSSH PRIVATE KEY-----"),
]


@pytest.mark.parametrize("variable", SECRETS)
def test_what_looks_like_a_secret_is_refused_with_the_way_to_pass_it(variable):
    with pytest.raises(ConfigError, match="looks like .*written to the disk; export it in the shell") as refused:
        with_options(env=(variable,)).check()
    assert "mode 600" in str(refused.value)
    assert variable.partition("=")[2] not in str(refused.value), "an error is shown, and kept in logs"


@pytest.mark.parametrize(
    "overrides",
    [
        ["--sbatch", "export=ALL,WANDB_API_KEY=abc"],
        ["--sbatch", "export=ALL,PGPASS=abc"],
        ["--sbatch", "exp=ALL,PGPASS=abc"],
        ["--sbatch", "comment=hf_abcdefghijklmnopqrstuv"],
        ["--container", "docker://me:pass@registry.example#gtpo"],
        ["--partition", "https://me:pass@host"],
    ],
)
def test_secrets_in_other_options(overrides):
    with pytest.raises(ConfigError, match="written to the disk"):
        tiny_options(*overrides).check()


def test_what_only_sounds_like_a_secret_passes(tmp_path):
    key = tmp_path / "service-account.json"
    key.touch()
    harmless = [
        *("TOKENIZERS_PARALLELISM=false", "MAX_TOKENS=4096", "NCCL_DEBUG=INFO", "https_proxy=http://proxy:3128"),
        *("PYTHONPATH=/opt/a:/opt/b", "PGPASSFILE=/home/me/.pgpass", f"GOOGLE_APPLICATION_CREDENTIALS={key}", "X=a=b"),
        *("MONITOR=https://host:8080/path?step=1", "NCCL_SOCKET_IFNAME=eth0", "I_MPI_PIN=1", "COMMIT=" + "0f" * 20),
        "GIT=ssh://git@host:22/a/b",
    ]
    options = (
        "--sbatch",
        "export=ALL",
        "gpus=8",
        "mail-user=me@host",
        "--container",
        "docker://me@registry.example#g:1",
    )
    tiny_options("--env", *harmless, *options).check()
    digest = "registry.example:5000/gtpo:1@sha256:" + "0f" * 32
    tiny_options("--container", digest).check()
