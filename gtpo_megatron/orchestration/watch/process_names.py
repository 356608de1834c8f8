"""What messages call a process of a run, from what it is called by the system and by whom it was started."""

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
"""End of the program's or script's path, or title -> name."""

_SCRIPT_ARGUMENTS = 4
"""A script stands among the first arguments; later ones of Ray's are paths of other programs."""


def name_of_ray(command: Sequence[str]) -> str:
    """Of a process of Ray's own; empty for others."""
    for argument in command[:_SCRIPT_ARGUMENTS]:
        for ending, name in _OF_RAY.items():
            if argument.endswith(ending):
                return name
        if command and argument == command[0] and argument.endswith(("gcs_server", "raylet")):
            break
    return ""


def name_of_child(parent: str, command: Sequence[str]) -> str:
    """Of a process that one with a name has started; empty where no message needs one.

    Args:
        parent: its parent's name.
        command: its own arguments or title.
    """
    title = command[0] if command else ""
    if parent.startswith("rank ") and title.startswith("ray::"):  # forked: it still has the rank's title
        return f"checkpoint writer of {parent}"
    if parent.startswith("rollout engine") and title.startswith("VLLM::Worker"):
        number = "".join(character for character in title.rpartition("TP")[2] if character.isdigit())
        return f"worker {number or '0'} of {parent}"
    if parent == "reward process" and any("rewards.worker" in argument for argument in command):
        return "grading worker"
    return ""
