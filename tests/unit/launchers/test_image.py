"""What the image of ``docker/Dockerfile`` must have, which nobody builds here."""

import re
from pathlib import Path

import pytest

DOCKERFILE = Path(__file__).resolve().parents[3] / "docker" / "Dockerfile"


@pytest.mark.parametrize(
    ("package", "why"),
    [
        ("ibverbs-providers", "NCCL finds no InfiniBand"),
        ("bubblewrap", "code rewards are refused"),
    ],
)
def test_what_nothing_else_installs(package, why):
    """No package that the image asks for depends on these: libibverbs1 only recommends its drivers."""
    command = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    asked = re.search(r"apt-get install -y --no-install-recommends ([^&]*)&&", command)
    assert package in asked[1].split(), f"without it {why}"
