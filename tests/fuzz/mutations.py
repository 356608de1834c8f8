"""What damage, mistakes and malice make of a file or a value; each has a name, so that a failure can be repeated."""

import json
import os
import random
import shutil
from pathlib import Path

BAD_VALUES = (
    *("null", "true", "[]", "{}", '""', '"x"', "-1", "0", "0.5", "1e999", "-1e999", "NaN", "1e308", "1e-320"),
    *("9" * 26, "9" * 300, "9" * 5000, "-" + "9" * 20, "[[[1]]]", '{"a":{"a":[1]}}', "[null]", "[[],{}]", "1.5"),
    *('"../../x"', '"/etc/passwd"', '".."', '"a\\u0000b"', '"a\\nb"', '"\\u001b[31m"', '"\\ud800"', '"1e999"', '"nan"'),
    *(json.dumps("x" * 300), json.dumps("[" * 500), "[" * 90 + "]" * 90, '{"a":1,"a":2}'),
)
"""As JSON has them; most are YAML too."""

BAD_WORDS = (
    *("", "x", "nan", "inf", "-inf", "-1", "0", "1e999", "1e-6", "9" * 26, "9" * 5000, "-" + "9" * 30, "0x10", "1_0"),
    *(
        "None",
        "True",
        "[]",
        "{}",
        "a\nb",
        "\x1b[31m",
        "\udcff",
        "x" * 300,
        "x" * 5000,
        "..",
        "../../x",
        ".",
    ),
    *("/dev/null", "/dev/full", "$(touch pwned)", "a b", "a,b", "a=b", "=", ":", "::", "--", "-", "é" * 130),
)
"""What may stand in a command line."""

PLACEHOLDER = "\x01here\x01"


def random_bytes(rng: random.Random) -> bytes:
    return b"\xff" + rng.randbytes(rng.randrange(1, 400))


def hostile_content(rng: random.Random) -> tuple[str, bytes]:
    """What is neither JSON nor JSONL nor YAML with anything usable in it."""
    made = {
        "binary": random_bytes(rng),
        "nuls": b"\0" * 100,
        "utf16": '{"a": 1}'.encode("utf-16"),
        "nested lists": b"[" * 200_000,
        "nested objects": b'{"a":' * 100_000,
        "closed nested lists": b"[" * 5000 + b"]" * 5000,
        "digits": b"1" * 5000,
        "keyed digits": b'{"step": ' + b"1" * 5000 + b"}",
        "half a pair": b'{"a": "\\ud800"}',
        "twice": b'{"a": 1, "a": 2}',
        "no object": b"[1, 2]\n",
        "a number": b"1\n",
        "a text": b'"x"\n',
    }
    name = rng.choice(sorted(made))
    return name, made[name]


def damaged_content(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """What a crash, a bad disk or an editor leaves: it may still be whole enough."""
    kind = rng.choice(["cut", "flip", "insert", "drop", "swap", "repeat", "crlf", "bom", "blank"])
    if not content:
        return "empty", b"\n"
    at = rng.randrange(len(content))
    if kind == "cut":
        return f"cut at {at}", content[:at]
    if kind == "flip":
        flipped = bytearray(content)
        for _ in range(rng.randrange(1, 6)):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return f"flip near {at}", bytes(flipped)
    if kind == "insert":
        return f"insert at {at}", content[:at] + rng.choice(
            [b"\0", b"\xff\xfe", b"{", b"]", b'"', b"\n\n", b"\t", b"9" * 400]
        ) + content[at:]
    if kind == "drop":
        return f"drop from {at}", content[:at] + content[at + rng.randrange(1, 40) :]
    if kind == "swap":
        lines = content.splitlines(keepends=True)
        rng.shuffle(lines)
        return "swap lines", b"".join(lines)
    if kind == "repeat":
        return "repeat", content + content
    if kind == "crlf":
        return "crlf", content.replace(b"\n", b"\r\n")
    return (kind, b"\xef\xbb\xbf" + content) if kind == "bom" else (kind, b"\n\n" + content)


def damaged_value(rng: random.Random, value: object) -> tuple[str, str]:
    """A JSON value with one of its parts replaced, dropped, renamed, added or there twice, as text."""
    paths = [path for path in _paths(value) if path]
    if not paths:
        bad = rng.choice(BAD_VALUES)
        return f"whole = {bad[:30]}", bad
    path = rng.choice(paths)
    made = json.loads(json.dumps(value))
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    last = path[-1]
    kind = rng.choice(["replace"] * 6 + ["drop", "rename", "twice"])
    if kind == "drop":
        del holder[last]
        return f"drop {path}", json.dumps(made)
    if kind == "rename" and isinstance(holder, dict):
        holder[rng.choice(["x", "../x", "", "a\nb", "é", "__class__"])] = holder.pop(last)
        return f"rename {path}", json.dumps(made)
    if kind == "twice" and isinstance(holder, dict):
        old = json.dumps(holder[last])
        holder[last] = PLACEHOLDER
        return f"twice {path}", json.dumps(made).replace(json.dumps(PLACEHOLDER), f"{old}, {json.dumps(last)}: {old}")
    bad = rng.choice(BAD_VALUES)
    holder[last] = PLACEHOLDER
    return f"{path} = {bad[:30]}", json.dumps(made).replace(json.dumps(PLACEHOLDER), bad)


def _paths(value: object, here: tuple = ()) -> list[tuple]:
    found = [here]
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(pairs)[:60]:
        found += _paths(child, (*here, key))
    return found


def replace_by_no_file(rng: random.Random, path: Path) -> str:
    """Something else than a file under the file's name."""
    kind = rng.choice(["folder", "loop", "dangling link", "absent", "link to null", "socket of no name"])
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling link":
        path.symlink_to("/nowhere/at/all")
    elif kind == "link to null":
        path.symlink_to("/dev/null")
    elif kind != "absent":
        os.mknod(path, 0o140644)  # a socket: S_IFSOCK
    return kind


def damaged_header(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """Of a safetensors file: eight bytes of length, then JSON, then the tensors."""
    length = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + length], content[8 + length :]
    kind = rng.choice(["length", "value", "value", "value", "bytes", "cut", "rest"])
    if kind == "length":
        bad = rng.choice([0, 1, length - 1, length + 1, 1 << 40, (1 << 64) - 1, len(content)])
        return f"length {bad}", bad.to_bytes(8, "little") + content[8:]
    if kind == "value":
        what, text = damaged_value(rng, json.loads(header))
        made = text.encode()
        return what, len(made).to_bytes(8, "little") + made + rest
    if kind == "bytes":
        what, made = damaged_content(rng, header)
        return what, len(made).to_bytes(8, "little") + made + rest
    if kind == "cut":
        at = rng.randrange(len(content))
        return f"cut at {at}", content[:at]
    return "more at the end", content + b"\0" * 64
