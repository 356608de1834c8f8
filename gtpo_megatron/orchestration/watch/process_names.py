"""Names of a run's processes in messages, from their command lines and parents."""

from collections.abc import Sequence

from gtpo_megatron.orchestration.watch.deaths import DASHBOARD_AGENT, GCS, RAYLET, RUNTIME_ENV_AGENT

_OF_RAY = {
    "gcs/gcs_server": GCS,
    "raylet/raylet": RAYLET,
    "ray::DashboardAgent": DASHBOARD_AGENT,
    "dashboard/agent.py": DASHBOARD_AGENT,
    "ray::RuntimeEnvAgent": RUNTIME_ENV_AGENT,
    "runtime_env/agent/main.py": RUNTIME_ENV_AGENT,
    "_private/log_monitor.py": "Ray's log monitor",
    "_private/monitor.py": "Ray's autoscaler monitor",
    "dashboard/dashboard.py": "Ray's dashboard",
}
"""Suffix of the program's or script's path, or title -> name."""

_SCRIPT_ARGUMENTS = 4
"""Arguments that may be the script; later ones of Ray's processes are other paths."""


def name_of_ray(command: Sequence[str]) -> str:
    """The name of one of Ray's processes; empty for others."""
    for argument in command[:_SCRIPT_ARGUMENTS]:
        for ending, name in _OF_RAY.items():
            if argument.endswith(ending):
                return name
        if command and argument == command[0] and argument.endswith(("gcs_server", "raylet")):
            break
    return ""


def name_of_child(parent: str, command: Sequence[str]) -> str:
    """The name of a child of a named process; may be empty.

    Args:
        parent: its parent's name.
        command: its own arguments or title.
    """
    title = command[0] if command else ""
    if parent.startswith("rank ") and title.startswith("ray::"):  # a fork still has the rank's title
        return f"checkpoint writer of {parent}"
    if parent.startswith("rollout engine") and title.startswith("VLLM::Worker"):
        number = "".join(character for character in title.rpartition("TP")[2] if character.isdigit())
        return f"worker {number or '0'} of {parent}"
    if parent == "reward process" and any("rewards.processes.worker" in argument for argument in command):
        return "grading worker"
    return ""
