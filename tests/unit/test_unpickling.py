"""Nothing but ``weights/megatron/restricted_pickle.py`` unpickles, and nothing else runs what a file says."""

import ast
from pathlib import Path

import pytest

import gtpo_megatron

ROOT = Path(gtpo_megatron.__file__).parents[1]
THE_PLACE = ROOT / "gtpo_megatron" / "weights" / "megatron" / "restricted_pickle.py"
MEGATRONS = ROOT / "gtpo_megatron" / "actor" / "checkpoint" / "megatron_load.py"
FILES = sorted(
    path for folder in ("gtpo_megatron", "launchers", "recipes", "tools") for path in (ROOT / folder).rglob("*.py")
)

CALLS = {
    "pickle": {"load", "loads", "Unpickler", "_Unpickler", "_load", "_loads"},
    "torch": {"load"},
    "torch.jit": {"load"},
    "torch.package": {"PackageImporter"},
    "torch.serialization": {"load", "add_safe_globals", "clear_safe_globals"},
    "torch.distributed.checkpoint": {"FileSystemReader", "DefaultLoadPlanner", "load_state_dict"},
    "torch.distributed.checkpoint.filesystem": {"FileSystemReader"},
    "torch.distributed.checkpoint.default_planner": {"DefaultLoadPlanner"},
    "marshal": {"load", "loads"},
    "yaml": {"unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "UnsafeLoader", "FullLoader", "Loader"},
}
"""By module: what unpickles, or makes objects of any class."""
MODULES = {"shelve", "dill", "cloudpickle", "joblib", "_pickle"}
"""``pickletools`` is not among them: it lists the operations of a pickle and executes none."""
KEYWORDS = {"allow_pickle": False, "weights_only": True, "trust_remote_code": False}
"""An argument that is given must be this."""
MEGATRON = "megatron.core.dist_checkpointing"
LOADS = {"load", "load_common_state_dict", "load_sharded_metadata", "load_tensors_metadata", "load_content_metadata"}


def forbidden(source):
    """What a module uses of it, as ``line: name``."""
    nodes = list(ast.walk(ast.parse(source)))
    names = dict(pair for node in nodes for pair in bound(node))
    found = [f"{node.lineno}: {full}" for node in nodes for full in used(node, names) if is_forbidden(full)]
    return found + [f"{node.value.lineno}: {node.arg}" for node in nodes if lifts_a_restriction(node)]


def bound(node):
    """Names that an import binds, each with its full name."""
    if isinstance(node, ast.ImportFrom):
        return [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
    if isinstance(node, ast.Import):
        return [(alias.asname, alias.name) if alias.asname else (root(alias.name),) * 2 for alias in node.names]
    return []


def used(node, names):
    if isinstance(node, ast.Name | ast.Attribute):
        return [dotted(node, names)]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [full for _, full in bound(node)]


def root(name):
    return name.split(".")[0]


def is_forbidden(full):
    module, _, name = full.rpartition(".")
    is_megatrons = full.startswith(MEGATRON) and name in LOADS
    return name in CALLS.get(module, ()) or root(full) in MODULES or is_megatrons


def lifts_a_restriction(node):
    if not isinstance(node, ast.keyword) or node.arg not in KEYWORDS:
        return False
    return not isinstance(node.value, ast.Constant) or node.value.value is not KEYWORDS[node.arg]


def dotted(node, names):
    """The full name of a name or of a chain of attributes; an empty text where it is none."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def test_nothing_else_unpickles():
    others = [path for path in FILES if path not in (THE_PLACE, MEGATRONS)]
    assert len(others) > 300
    found = {str(path.relative_to(ROOT)): forbidden(path.read_text(encoding="utf-8")) for path in others}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_two_places_load_with_the_restriction():
    assert "weights_only=True" in THE_PLACE.read_text(encoding="utf-8")
    found = {entry.split(": ")[1] for entry in forbidden(MEGATRONS.read_text(encoding="utf-8"))}
    assert found == {f"{MEGATRON}.serialization.load"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "import pickle as p\np.load(f)",
        "from pickle import loads",
        "from pickle import Unpickler as U",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=True)",
        "from torch import load",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "read(f, weights_only=flag)",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader",
        "from torch.distributed.checkpoint import FileSystemReader",
        "import torch.distributed.checkpoint\ntorch.distributed.checkpoint.FileSystemReader(f)",
        "from megatron.core import dist_checkpointing\ndist_checkpointing.load(a, b)",
        "import cloudpickle",
        "import shelve",
        "import yaml\nyaml.load(f, Loader=yaml.Loader)",
        "import yaml\nyaml.unsafe_load(f)",
        "AutoTokenizer.from_pretrained(f, trust_remote_code=True)",
        "import torch\ntorch.jit.load(f)",
    ],
)
def test_what_it_forbids(source):
    assert forbidden(source)


@pytest.mark.parametrize(
    "source", ["import pickle\npickle.dumps(1)", "import json\njson.loads('1')", "import numpy as np\nnp.load(f)"]
)
def test_what_it_lets_pass(source):
    assert forbidden(source) == []
