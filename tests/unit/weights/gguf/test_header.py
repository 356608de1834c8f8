"""Headers of GGUF files of anybody: what they say, or one line; never more memory or time than the file's size."""

import random
import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.gguf.header import read_header
from gtpo_megatron.weights.gguf.model import model_architecture
from tests.unit.weights.gguf.files import SHAPES, make_folder, write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("header")
    shape = SHAPES["llama"]
    write_gguf(folder / "model.gguf", make_folder(folder / "original", shape), shape, GGMLQuantizationType.Q8_0)
    return folder / "model.gguf"


def test_it_says_what_the_package_gguf_reads(file):
    header, reader = read_header(file), GGUFReader(file)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        found = header.tensors[tensor.name]
        assert found.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (found.type_id, found.offset) == (tensor.tensor_type, tensor.data_offset)
    for key, value in header.keys.items():
        read = reader.fields[key].contents()
        assert value == (pytest.approx(read, rel=1e-7) if isinstance(value, float) else read)


@pytest.mark.parametrize("number", [1e-5, 1e-6, 10000.0, 5e5, 3.4028235e38, 1e-45, 0.1, -2.5, 0.0, 1 / 3])
def test_float32_numbers_are_decimals_again(number, tmp_path):
    key = b"a"
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + key + struct.pack("<If", 6, number)
    (tmp_path / "one.gguf").write_bytes(content)
    found = read_header(tmp_path / "one.gguf").keys["a"]
    assert np.float32(found) == np.float32(number)
    assert len(repr(found)) <= len(repr(float(np.float32(number))))
    if len(repr(number)) < 10:
        assert found == number


def text(value):
    return struct.pack("<Q", len(value)) + value


BEGIN = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
HOSTILE = {
    "empty": (b"", "begins with b'', expected b'GGUF'"),
    "other": (b"PK\x03\x04 a zip", "not a GGUF file"),
    "short": (b"GGUF\x03", "damaged"),
    "old": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, expected 2 or 3"),
    "big_endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "text_of_exabytes": (BEGIN + struct.pack("<Q", 1 << 62) + b"x", "a text of 4611686018427387904 bytes"),
    "list_of_exabytes": (BEGIN + text(b"k") + struct.pack("<IIQ", 9, 0, 1 << 62), "a list of 4611686018427387904"),
    "texts_of_exabytes": (BEGIN + text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 62), "a list of 4611686018427387904"),
    "list_of_lists": (BEGIN + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "values of type 9"),
    "unknown_type": (BEGIN + text(b"k") + struct.pack("<I", 77), "a value of type 77"),
    "no_utf8": (BEGIN + text(b"\xff") + struct.pack("<IB", 0, 0), "damaged"),
    "keys_without_end": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), "damaged"),
    "key_twice": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text(b"k") + struct.pack("<IB", 0, 1)), "'k' twice"),
    "dimensions": (
        BEGIN + text(b"k") + struct.pack("<IB", 0, 1) + text(b"t") + struct.pack("<I", 1 << 31),
        "of 2147483648 dimensions",
    ),
    "alignment": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0),
        "general.alignment=0",
    ),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_one_line(content, message, tmp_path):
    (tmp_path / "hostile.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_header(tmp_path / "hostile.gguf")
    assert "\n" not in str(error.value)


def test_a_cut_or_changed_header_is_one_line_or_a_model(file, tmp_path):
    """Every cut, and bytes changed at random: an error of ours, or an architecture that passed all checks."""
    whole = file.read_bytes()
    end = min(tensor.offset for tensor in read_header(file).tensors.values())
    broken = tmp_path / "broken.gguf"
    rng = random.Random(5)
    cuts = [whole[: rng.randrange(end - 64)] for _ in range(60)]
    changes = []
    for _ in range(200):
        content = bytearray(whole[: end + 64])
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(end)] = rng.randrange(256)
        changes.append(bytes(content))
    messages = []
    for content in (*cuts, *changes):
        broken.write_bytes(content)
        try:
            model_architecture(read_header(broken))
        except ConfigError as error:
            messages.append(str(error))
    assert len(messages) >= len(cuts)
    assert not [message for message in messages if "\n" in message]


@pytest.mark.parametrize("architecture", ["qwen2moe", "gemma3", "mamba"])
def test_an_unknown_architecture_is_named(architecture, file, tmp_path):
    key = b"general.architecture"
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(key) + struct.pack("<I", 8) + text(architecture.encode())
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(
        ConfigError, match=f"architecture '{architecture}' is not converted; known: llama, qwen2, qwen3"
    ):
        model_architecture(read_header(tmp_path / "other.gguf"))
