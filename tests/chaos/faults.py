"""What can be done to a run, and which of its processes is meant."""

import random
import re
from dataclasses import dataclass

import psutil

STAGES = ("start", "rollout", "reward", "score", "credit", "update", "weight_sync", "checkpoint", "evaluation")
"""In which a fault is put; ``checkpoint`` lasts while ranks write in the background."""

_SCRIPTS = {
    "Ray's GCS": r"gcs/gcs_server$",
    "Ray's raylet": r"raylet/raylet$",
    "Ray's dashboard agent": r"ray::DashboardAgent|dashboard/agent\.py",
    "Ray's runtime environment agent": r"ray::RuntimeEnvAgent|runtime_env/agent/main\.py",
    "supervisor": r"orchestration\.run_supervisor",
}

ENDS_RUN = frozenset(
    {"rank 0", "rank 1", "reward process", "Ray's GCS", "Ray's raylet", "Ray's dashboard agent", "driver"}
    | {"Ray's runtime environment agent", "checkpoint writer"}
)
"""Kinds whose death no run survives."""

_OWN_KINDS = ("rank 0", "rank 1", "rollout engine", "engine worker", "reward process", "grading worker")

KINDS = (*_OWN_KINDS, "driver", *(name for name in _SCRIPTS if name != "supervisor"), "checkpoint writer")
"""Those that are drawn: without its helper a run goes on, but a driver that is killed then leaves processes behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One process to kill.

    Attributes:
        kind: kind of process.
        stage: stage in which it is killed.
        delay_s: seconds from the stage's beginning.
    """

    kind: str
    stage: str
    delay_s: float

    def __str__(self) -> str:
        return f"SIGKILL to {self.kind} in {self.stage}"


def draw_faults(seed: int, num: int) -> list[Fault]:
    """The same faults for the same seed: every kind comes before one comes again."""
    dice = random.Random(seed)
    faults: list[Fault] = []
    while len(faults) < num:
        round_of_kinds = list(KINDS)
        dice.shuffle(round_of_kinds)
        for kind in round_of_kinds:
            stages = ["checkpoint"] if kind == "checkpoint writer" else list(STAGES)
            faults.append(Fault(kind=kind, stage=dice.choice(stages), delay_s=dice.choice((0.0, 0.02, 0.2))))
    return faults[:num]


def find(kind: str, driver: int, log: str) -> psutil.Process | None:
    """The process of a kind; None where there is none yet."""
    try:
        root = psutil.Process(driver)
        if kind == "driver":
            return root
        family = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return None
    if kind in _SCRIPTS:
        return next(
            (process for process in family if any(re.search(_SCRIPTS[kind], a) for a in command_of(process)[:4])), None
        )
    named = {name: _last_pid(name, log) for name in ("rank 0", "rank 1", "rollout engine", "reward process")}
    if kind in named:
        return next((process for process in family if process.pid == named[kind]), None) or (
            _untold(kind, family) if named[kind] is None else None
        )
    parents = {
        "engine worker": ("rollout engine",),
        "grading worker": ("reward process",),
        "checkpoint writer": ("rank 0", "rank 1"),
    }[kind]
    pattern = {
        "engine worker": r"VLLM::Worker",
        "grading worker": r"processes\.worker",
        "checkpoint writer": r"^ray::",
    }[kind]
    owners = {named[parent] for parent in parents}
    for process in family:
        try:
            is_child = process.ppid() in owners
        except psutil.NoSuchProcess:
            continue
        if is_child and any(re.search(pattern, argument) for argument in command_of(process)):
            return process
    return None


def _untold(kind: str, family: list[psutil.Process]) -> psutil.Process | None:
    """Before the run has said who is who: any of the right class."""
    title = {"rank 0": "ray::RankProcess", "rank 1": "ray::RankProcess", "rollout engine": "ray::EngineProcess"}.get(
        kind, "ray::RewardProcess"
    )
    return next((p for p in family if " ".join(command_of(p)).startswith(title)), None)


def command_of(process: psutil.Process) -> list[str]:
    """Its arguments; none if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _last_pid(name: str, log: str) -> int | None:
    found = re.findall(rf": {name}: process (\d+) on", log)
    return int(found[-1]) if found else None


def is_named(fault: Fault, pid: int, line: str, stages: set[str]) -> bool:
    """Whether a line names the process and the stage."""
    names = {
        "engine worker": r"worker \d of rollout engine",
        "checkpoint writer": r"checkpoint writer of rank \d|rank \d: its writer",
        # later it is replaced
        "grading worker": r"reward process, in start: reward function .*: a worker did not start",
    }
    if fault.stage == "start" and fault.kind.startswith("rank"):
        names[fault.kind] = r"rank \d"  # before they have told their numbers nobody knows which
    name = names.get(fault.kind, re.escape(fault.kind))
    first = line.partition(": ")[2].partition(": ")[2]  # after "gtpo-megatron: WorkerError: "
    first = re.sub(r"^([^(:,]*) \(tp[^()]*\)", r"\1", first)  # Ray's word came first: it has the place in the layout
    number = re.match(rf"(?:{name}) \(process (\d+)\)", first)
    if number is not None:
        is_right = int(number[1]) == pid
    else:
        is_right = re.match(rf"(?:{name})(?: died|, in |: )", first) is not None or (
            fault.kind == "checkpoint writer" and re.search(name, first) is not None
        )
    found = re.search(r" in (\w+(?: or \w+)*)", first)  # several if the run went on before the end was seen
    is_in = found is not None and not stages.isdisjoint(found[1].split(" or "))
    return is_right and (fault.kind == "checkpoint writer" or is_in)
