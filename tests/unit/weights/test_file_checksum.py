"""The checksum of a file is that of its content, however long."""

import pytest
import xxhash

from gtpo_megatron.weights.file_checksum import file_checksum


@pytest.mark.parametrize("size", [0, 1, (1 << 22) + 5])
def test_it_is_what_the_command_line_tool_prints(tmp_path, size):
    content = bytes(index % 251 for index in range(size))
    (tmp_path / "file").write_bytes(content)
    assert file_checksum(tmp_path / "file") == xxhash.xxh3_128_hexdigest(content)


def test_one_bit_changes_it(tmp_path):
    (tmp_path / "a").write_bytes(b"\x00" * 1000)
    (tmp_path / "b").write_bytes(b"\x00" * 999 + b"\x01")
    assert file_checksum(tmp_path / "a") != file_checksum(tmp_path / "b")
