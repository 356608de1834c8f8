"""A plugin of vLLM: an engine compiles nothing and captures no graphs, whoever starts it and in whatever process.

``benchmarks.peer_step --eager`` uses it for both sides: a start takes a minute less, and a vLLM that was built for
another torch meets fewer of its parts. On a CPU our engine is eager anyway.
"""

from pathlib import Path

NAME = "gtpo_peer_eager"


def install(folder: Path) -> None:
    """Makes a folder that vLLM finds the plugin in if it is on ``PYTHONPATH``."""
    about = folder / f"{NAME}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n", encoding="utf-8")
    entry = f"[vllm.general_plugins]\n{NAME} = benchmarks.eager_vllm:apply\n"
    (about / "entry_points.txt").write_text(entry, encoding="utf-8")


def apply() -> None:
    """Called by vLLM, in each of its processes and sometimes twice, before it reads an engine's arguments."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if getattr(create, "is_eager", False):
        return

    def create_engine_config(self, *args, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN202 - vLLM's own signature
        self.enforce_eager = True
        return create(self, *args, **kwargs)

    create_engine_config.is_eager = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
