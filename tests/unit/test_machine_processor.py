"""What Linux says of a processor, and what follows from it."""

import pytest

from gtpo_megatron import machine_processor
from gtpo_megatron.machine_processor import multiplies_bfloat16, processor_flags

XEON = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx2 {}\nbugs\t\t: none\n\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (2 * XEON.format("avx512_bf16 amx_bf16 amx_tile"), True),
        (XEON.format("avx512f avx512_bf16"), True),
        (XEON.format("avx512f"), False),
        (ARM, False),
        ("", False),
        (None, False),
    ],
)
def test_bfloat16_where_linux_lists_its_products(tmp_path, monkeypatch, content, expected):
    path = tmp_path / "cpuinfo"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(machine_processor, "CPUINFO", path)
    assert multiplies_bfloat16() is expected
    assert ("avx2" in processor_flags()) is bool(content and "avx2" in content)
