"""Whatever an option holds, a job runs what it should run and nothing else: the launcher's scripts, run by bash."""

import io
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gtpo_megatron.errors import ConfigError
from launchers import local, slurm
from launchers.options import SlurmOptions
from tests.unit.launchers.job_run import PYTHON, make_stand_ins, run_batch, sbatch_options, write_program
from tests.unit.launchers.jobs import TINY, with_options

pytestmark = [
    pytest.mark.timeout(240),  # nemo-run is imported
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # and leaves files open
]

SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))
SEED, NUM_ROUNDS, CASES_PER_ROUND = 14, 4, 15

PIECES = (
    *("$(touch pwned)", "`touch pwned`", ";touch pwned;", "|touch pwned", "&touch pwned&", "${IFS}touch${IFS}pwned"),
    *("$HOME", "%j", "~", "*", "?", "[a-z]", "{a,b}", "<(touch pwned)", ">pwned", "<pwned", "!!", "\\", "'", '"', "#"),
    *(" ", "\t", "  ", "=", ",", ":", "-", "--wrap=touch pwned", "a", "Z9", "é", "%", "^", "@", "+", ".", "_"),
    *("\n", "\r", "\n#SBATCH --wrap='touch pwned'\n", "\0", "\x1b[2J", "\u2028", "\x85", "\x0b"),
)
QUOTED = ("--account", "--partition", "--sbatch", "--env", "--python", "--network-interface", "cwd")
"""Options that may hold any text of one line; the others have rules of their own."""

OTHERS = ("--name", "--run-dir", "--time", "--mem", "--container-mount")


def nasty(chance):
    """A few pieces; every sixth text may hold a control character."""
    pieces = PIECES if chance.random() < 1 / 6 else PIECES[: PIECES.index("\n")]
    return "".join(chance.choices(pieces, k=chance.randint(1, 5)))


def options_of(chance, folder):
    """One to three options with nasty values, the others plain; what ``--python`` names is there."""
    values = {
        "--account": "team",
        "--partition": "batch",
        "--run-dir": str(folder / "run"),
        "--python": str(folder / "python"),
        "cwd": "stand",
    }
    options = QUOTED if chance.random() < 0.7 else QUOTED + OTHERS
    for option in chance.sample(options, k=chance.randint(1, 3)):
        text = nasty(chance)
        values[option] = {
            "--sbatch": f"comment={text}",
            "--env": f"MINE={text}",
            "--python": f"{folder}/{text.replace('/', '')}/python",
            "--run-dir": f"{folder}/{text}",
            "cwd": f"stand{text.replace('/', '')}",
        }.get(option, text)
    return values


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(NUM_ROUNDS))
def test_a_job_runs_nothing_but_itself_whatever_its_options_hold(number, tmp_path, monkeypatch, capsys):
    chance, accepted = random.Random(SEED + number), 0
    for case in range(CASES_PER_ROUND):
        folder = tmp_path / str(case)
        folder.mkdir()
        values = options_of(chance, folder)
        accepted += submit_and_run(values, folder, monkeypatch, capsys)
    assert accepted >= CASES_PER_ROUND // 4, "most are refused: nothing is tested"


def submit_and_run(values, folder, monkeypatch, capsys):
    """True where the launcher took the values; either way nothing has happened that should not have."""
    programs = make_stand_ins(folder)
    if "\0" in values["--python"] + values["cwd"]:
        return False  # no such file can be made
    stand, python = folder / values["cwd"], Path(values["--python"])
    for path in (stand, python.parent):
        path.mkdir(parents=True, exist_ok=True)
    write_program(python, PYTHON)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(folder / "record"))
    monkeypatch.chdir(stand)
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nemo-run passes it on
    arguments = ["recipes.tiny_cpu:gtpo", *TINY, "--detach"]
    arguments += [f"{option}={value}" for option, value in values.items() if option.startswith("--")]
    try:
        status = slurm.run(arguments)
    finally:
        monkeypatch.setenv("PATH", os.environ["PATH"].partition(":")[2])
    error = capsys.readouterr().err
    assert not list(folder.rglob("pwned*")), values
    if status:
        assert (status, error.count("\n")) == (2, 1), (values, error)
        assert not list((folder / "record").iterdir()), values
        return False
    check_job(values, folder, programs, stand)
    return True


def check_job(values, folder, programs, stand):
    """What Slurm reads, what each program was told, and what the driver has in its environment."""
    run_dir = Path(values["--run-dir"])
    (launch,) = (run_dir / "launch").iterdir()
    name = next(word for word in sbatch_options(launch / "sbatch.sh") if word.startswith("--job-name=")).partition("=")[
        2
    ]
    expected = {
        "account": values["--account"],
        "dependency": "singleton",
        "job-name": name,
        "mem": values.get("--mem", "0"),
        "nodes": "2",
        "ntasks-per-node": "1",
        "open-mode": "append",
        "output": f"{run_dir}/logs/sbatch_{name}_%j.out",
        "partition": values["--partition"],
        "signal": "B:USR1@900",
        "time": values.get("--time", "04:00:00"),
    }
    if "--sbatch" in values:
        expected["comment"] = values["--sbatch"].partition("=")[2]
    told = sbatch_options(launch / "sbatch.sh")
    assert sorted(told) == sorted(["--exclusive", *(f"--{key}={value}" for key, value in expected.items())]), values

    ran = run_batch(launch / "sbatch.sh", programs, stand)
    assert ran.status == 0, (values, ran.output)
    assert not list(folder.rglob("pwned*")), values
    sbatch = [words[:-1] for words in ran.calls["sbatch"]]
    assert sbatch == [["--test-only"], ["--requeue", "--parsable"]], values
    assert ran.calls["scontrol"] == [["show", "hostnames", "node[0-1]"]], values
    _, job = ran.calls["srun"]
    assert job[:2] == ["--output", f"{run_dir}/logs/log-{name}_%j_0.out"], values
    assert job[-3:] == ["bash", str(launch / "node.sh"), str(launch / "settings.sh")], values
    assert len(job) == 11, (values, job)
    driver = ran.calls["python"][-1]
    config = ["-m", "gtpo_megatron.cli", "train", str(launch / "config.yaml"), "--run-dir", str(run_dir), "--resume"]
    assert driver == [*config, "--cluster.address", "127.0.0.1:6379", "--cluster.num-nodes", "2"], values
    assert ran.folder == str(stand), values
    network = next(words for words in ran.calls["python"] if words[0].endswith("node_network.py"))
    assert network[1] == values.get("--network-interface", ""), values
    if "--env" in values:
        assert ran.environment["MINE"] == values["--env"].partition("=")[2], values
    # it wonders, below a warning, whether a quoted $( or \\ was meant to be
    command = [SHELLCHECK, "--severity=warning", str(launch / "settings.sh")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, (values, found.stdout)


CONTROL = ["a\nb", "a\n#SBATCH --wrap='touch pwned'", "a\rb", "a\0b", "a\x1b[2Jb", "a\u2028b", "a\x85b", "\udc80"]


FIELDS = ("account", "partition", "sbatch", "env", "python", "network_interface", "name", "container", "run_dir")


@pytest.mark.parametrize("field", FIELDS)
def test_control_characters_are_refused_in_every_option_in_one_line(field):
    for value in CONTROL:
        text = {"sbatch": (f"comment={value}",), "env": (f"MINE={value}",)}.get(field, value)
        with pytest.raises(ConfigError, match=r"\A.*\Z"):  # one line
            with_options(**{field: text}).check()


def test_an_option_of_a_later_version_is_looked_at_too():
    @dataclass(frozen=True, kw_only=True)
    class Later(SlurmOptions):
        many: tuple[str, ...] = ()

    options = Later(config=with_options().config, account="a", partition="b", many=("good", "bad\nline"))
    with pytest.raises(ConfigError, match=r"--many 'bad\\nline': holds '\\n'"):
        options.check()


NAMES = ("my first run", "n$(touch pwned)", "a/b", "..", "-n", ".hidden", "a;b", "a'b", "%j", "name" * 26, "é", "a\tb")


@pytest.mark.parametrize("launcher", [slurm, local])
def test_a_name_that_job_and_folder_cannot_share(launcher, tmp_path, monkeypatch, capsys):
    """Every such name by the check, one by each command."""
    message = "--name {!r}: job and logs are named by it; use letters, digits and . _ + @ -"
    for name in NAMES:
        with pytest.raises(ConfigError, match=re.escape(message.format(name))):
            with_options(name=name).check()
    monkeypatch.chdir(tmp_path)
    where = ["--account=a", "--partition=p", *TINY] if launcher is slurm else []
    assert launcher.run(["recipes.tiny_cpu:gtpo", *where, f"--name={NAMES[1]}", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert message.format(NAMES[1]) in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_path_that_nemo_run_would_rewrite(tmp_path, capsys):
    arguments = ["recipes.tiny_cpu:gtpo", "--account=a", "--partition=p", *TINY, "--dry-run"]
    assert slurm.run([*arguments, "--run-dir", str(tmp_path / "nemo_run" / "run")]) == 2
    assert "nemo-run writes a path of its own wherever /nemo_run stands" in capsys.readouterr().err
