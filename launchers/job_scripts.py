"""The scripts of a job: copied into its folder as they are, and told what they need to know by ``settings.sh``."""

from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent / "job"
SCRIPT_NAMES = ("node.sh", "batch.sh", "node_network.py")
SETTINGS = frozenset(
    {
        *("RUN_DIR", "LAUNCH_DIR", "LOG_DIR", "CONFIG", "SUBMIT_DIR", "PYTHON", "IMAGE", "GPUS_PER_NODE", "RAY_CPUS"),
        *("OBJECT_STORE_BYTES", "RAY_PORT", "NETWORK_INTERFACE", "START_DEADLINE_S", "RESTARTS", "CHAIN", "JOB_ENV"),
        "PREFLIGHT_S",
    }
)
"""Variables of ``settings.sh``."""
