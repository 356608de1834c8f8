"""Submits a job to a Slurm that is not there, then runs what was submitted: the scripts under bash, with stand-ins.

Every stand-in writes down the words that it was given, which is what the tests look at.
"""

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

STAND_IN = """\
#!/bin/bash
words=$(mktemp "$RECORD/NAME.XXXXXX")
printf '%s\\0' "$@" > "$words"
"""

SBATCH = STAND_IN.replace("NAME", "sbatch") + 'env -0 > "$RECORD/submitted.${words##*.}"\necho 7\n'

SCONTROL = STAND_IN.replace("NAME", "scontrol") + "echo node0\n"

SRUN = (
    STAND_IN.replace("NAME", "srun")
    + """\
[[ $1 == --nodes=1 ]] && { echo 127.0.0.1; exit; }
export SLURM_NODEID=0
while [[ $1 != bash ]]; do shift; done
exec "$@"
"""
)

PYTHON = (
    STAND_IN.replace("NAME", "python")
    + """\
env -0 > "$RECORD/environment.${words##*.}"
pwd > "$RECORD/folder.${words##*.}"
case "$*" in
*node_network.py*) echo "network 127.0.0.1 lo 6379" ;;
*ray.scripts.scripts*)
  echo "Ray runtime started"
  trap 'exit 0' TERM
  while :; do sleep 0.05; done ;;
esac
"""
)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What the stand-ins saw.

    Attributes:
        status: of the batch script.
        output: of all of it.
        calls: by stand-in, the words of each call in turn.
        environment: of the driver.
        folder: that the driver stood in.
    """

    status: int
    output: str
    calls: dict[str, list[list[str]]]
    environment: dict[str, str]
    folder: str


def make_stand_ins(folder: Path) -> Path:
    """Programs named as Slurm's, in a folder for PATH, and the folder that they write to beside it."""
    programs = folder / "bin"
    programs.mkdir()
    (folder / "record").mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("srun", SRUN)):
        write_program(programs / name, text)
    return programs


def write_program(path: Path, text: str) -> None:
    """A script that can be run."""
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def run_batch(script: Path, programs: Path, cwd: Path) -> Ran:
    """Runs a batch script as Slurm would on the first node."""
    record = programs.parent / "record"
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]"}
    done = subprocess.run(
        ["bash", str(script)],
        cwd=cwd,
        env={"PATH": f"{programs}:/usr/bin:/bin", "RECORD": str(record), **slurm},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    calls: dict[str, list[list[str]]] = {"sbatch": [], "scontrol": [], "srun": [], "python": []}
    environment, folder = {}, ""
    for path in sorted(record.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        name, _, number = path.name.partition(".")
        if name in calls:
            words = path.read_text(encoding="utf-8").split("\0")[:-1]
            calls[name].append(words)
            if "gtpo_megatron.cli" in words:
                pairs = (record / f"environment.{number}").read_text(encoding="utf-8").split("\0")[:-1]
                environment = dict(pair.split("=", 1) for pair in pairs)
                folder = (record / f"folder.{number}").read_text(encoding="utf-8").removesuffix("\n")
    return Ran(
        status=done.returncode, output=done.stdout + done.stderr, calls=calls, environment=environment, folder=folder
    )


def sbatch_options(script: Path) -> list[str]:
    """What Slurm reads in a batch script: the ``#SBATCH`` lines before the first command, unquoted."""
    found = []
    for line in script.read_text(encoding="utf-8").split("\n"):
        if line.startswith("#SBATCH"):
            found += shlex.split(line.removeprefix("#SBATCH"), comments=True)
        elif line.strip() and not line.startswith("#"):
            break
    return found
