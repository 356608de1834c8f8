"""Fails if a Python file has more than 500 lines."""

import subprocess
import sys
from pathlib import Path

CAP_LINES = 500
EXCEPTIONS: dict[str, str] = {"gtpo_megatron/batch.py": "the records between stages, which are read together"}
"""Path from the repository root -> the reason why it may be longer."""


def oversized(root: Path) -> list[tuple[str, int]]:
    """Python files under version control that are longer than the cap, longest first."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    sizes = [(name, (root / name).read_text(encoding="utf-8").count("\n")) for name in listed if (root / name).exists()]
    return sorted(((n, s) for n, s in sizes if s > CAP_LINES and n not in EXCEPTIONS), key=lambda row: -row[1])


def main() -> int:
    """Prints every file over the cap; exit status 1 if there is one."""
    found = oversized(Path(__file__).resolve().parent.parent)
    for name, size in found:
        print(f"{name}: {size} lines, at most {CAP_LINES}; split it by idea or add it to EXCEPTIONS with a reason")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
