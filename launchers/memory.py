"""The memory plan of a job, and the time of a step that it estimates."""

from launchers.options import SlurmOptions


def memory_text(options: SlurmOptions) -> str:
    """Stub until the planner lands."""
    return ""


def estimated_step_s(options: SlurmOptions) -> float:
    """Stub."""
    return 0.0
