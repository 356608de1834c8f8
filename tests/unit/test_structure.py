"""The shape of the repository, where a linter cannot say it."""

import ast
import re
import sys
from pathlib import Path

import pytest

import gtpo_megatron
from gtpo_megatron import errors
from tests import order

ROOT = Path(gtpo_megatron.__file__).parent
TESTS = Path(__file__).parent


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize(
    "path", sorted((ROOT / "algorithms").rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_algorithms_import_torch_and_the_standard_library_only(path):
    for name in imported_modules(path):
        root = name.split(".")[0]
        assert root in {"torch", "gtpo_megatron"} or root in sys.stdlib_module_names, name
        assert not name.startswith("torch.distributed"), name


@pytest.mark.parametrize(
    "folder", ["algorithms", "distributed", "weights", "config", "conversations", "data", "rewards", "companions"]
)
def test_every_folder_of_the_path_of_data_has_its_tests(folder):
    assert list((TESTS / folder).glob("test_*.py"))


def test_importing_the_package_imports_nothing_else():
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_environment_variables_are_read_in_launchers_only():
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "environ":
                parent = path.relative_to(ROOT)
                # orchestration sets what vLLM and Ray read, an evaluation what its engine reads, the worker of an
                # environment what an agent's HTTP client reads, verifiers' process gets a few of them, and a preflight
                # looks at the ports that NCCL will use
                owners = ("evaluation_run.py", "chat_endpoint.py", "verifiers.py", "system.py")
                owner = parent.parts[0] == "orchestration" or parent.name in owners
                assert owner, f"{parent} touches os.environ"
            assert not (isinstance(node, ast.Attribute) and node.attr == "getenv"), path


def test_errors_survive_pickling_and_keep_their_counterpart():
    import pickle

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.GTPOError)]
    assert len(kinds) >= 9
    for kind in kinds:
        again = pickle.loads(pickle.dumps(kind("what, got, expected")))
        assert type(again) is kind
        assert str(again) == "what, got, expected"
        if kind is not errors.GTPOError:
            assert len(kind.__mro__) > len(errors.GTPOError.__mro__) + 1, f"{kind.__name__} has no standard counterpart"


OWN_JSON = {
    "gtpo_megatron/companions/evaluate/verdict_file.py": "what it has just made of a value",
    "gtpo_megatron/run_folder/manifest.py": "what it has just made of a value",
    "gtpo_megatron/companions/preflight/children.py": "from the child that it has started",
    "gtpo_megatron/orchestration/run_supervisor.py": "from the driver that has started it",
    "gtpo_megatron/orchestration/on_ray/worker_servers.py": "from worker_setup.py, on a private socket",
    "gtpo_megatron/orchestration/on_ray/worker_setup.py": "its command line, written by the raylet",
    "gtpo_megatron/rewards/request.py": "what data/rows.py has just made of a row",
    "gtpo_megatron/rollout/conversation.py": "what data/rows.py has just made of a row",
    "gtpo_megatron/conversations/environment.py": "what data/rows.py has just made of a row",
    "gtpo_megatron/rewards/grade.py": "what it has just made of a value",
    "gtpo_megatron/rewards/code_tests.py": "what data/rows.py has just made of a row",
    "gtpo_megatron/rewards/outputs.py": "values that program_tests.py has just made, and a program's",
    "gtpo_megatron/sandbox/inside/main.py": "jobs, from the process that started it",
    "gtpo_megatron/sandbox/inside/text_modules.py": "its modules and settings, from the process that started it",
    "gtpo_megatron/sandbox/inside/processes.py": "in the sandbox, which has no other reader: a program's",
    "gtpo_megatron/sandbox/inside/python_tests.py": "tests, from the process that started it",
    "gtpo_megatron/sandbox/inside/separate_process/channel.py": "as processes.py",
    "gtpo_megatron/sandbox/inside/program.py": "arguments of a call, which program_tests.py has just made",
    "gtpo_megatron/data/reasoning_tasks.py": "from the process that it has started",
    "gtpo_megatron/data/reasoning_process.py": "its command line, written by the process that started it",
    "gtpo_megatron/rewards/reward_worker.py": "from the pool that has started it",
    "gtpo_megatron/conversations/environment_worker.py": "from the pool that has started it",
    "gtpo_megatron/user_code/worker.py": "its command line, written by the process that started it",
    "gtpo_megatron/conversations/verifiers_host.py": "from the process that started it; nothing of ours is there",
    "gtpo_megatron/distributed/input_checks.py": "from the other ranks of this run",
    "tools/make_tiny_model.py": "what the tokenizers library has just made",
}
"""Where JSON is read that nobody else may have written, and whose it is."""

PARSERS = {("json", "load"), ("json", "loads"), ("json", "JSONDecoder"), ("yaml", "load"), ("yaml", "load_all")}
PARSERS |= {("yaml", f"{kind}_load{all_}") for kind in ("safe", "full", "unsafe") for all_ in ("", "_all")}


def parsers_in(path):
    """Calls of other readers of JSON and YAML."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in PARSERS:
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in ("json", "yaml"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in ("orjson", "ujson", "simplejson", "ruamel"))


def test_what_others_may_have_written_is_read_in_one_place():
    found = {}
    for folder in ("gtpo_megatron", "launchers", "tools", "recipes"):
        for path in (ROOT.parent / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT.parent))
            if not name.startswith("gtpo_megatron/untrusted/") and (calls := list(parsers_in(path))):
                found[name] = calls
    assert found.keys() == OWN_JSON.keys(), "read it with gtpo_megatron.untrusted, which says in a line what is wrong"
    assert all(set(calls) == {"json.loads"} for calls in found.values())


@pytest.mark.slow
def test_sentences_are_printed_in_one_place():
    """Elsewhere a line would be broken at 80 columns, or brackets of a path taken for markup."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "print"
        and node.args
        and isinstance(node.args[0], ast.JoinedStr | ast.Constant)
    ]
    assert not found, "gtpo_megatron.sentence prints it whole"


def test_files_are_replaced_in_one_place():
    """Folders are renamed; a file is written by ``atomic_file``."""
    allowed = {
        "gtpo_megatron/atomic_file.py",
        "gtpo_megatron/orchestration/on_ray/dashboard_agent.py",  # a script that imports nothing of ours
        "gtpo_megatron/run_folder/checkpoints.py",
        "gtpo_megatron/weights/hf/writer.py",
    }
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # Path.replace and Path.rename take one argument, str.replace two
        renames = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("replace", "rename", "renames")
            and len(node.args) == 1
            and not node.keywords
        ]
        assert not renames or str(path.relative_to(ROOT.parent)) in allowed, path


def test_files_that_start_first_are_there():
    assert not [name for name in order.LONG if not (order.ROOT / name).is_file()]


def test_a_mark_stands_in_the_file_whose_tests_have_it():
    """``make`` reads the files alone that have the marks which it asks for: none may come from a helper."""
    makefile = (ROOT.parent / "Makefile").read_text(encoding="utf-8")
    asked = {name for found in re.findall(r"call with_mark,([\w|]+)", makefile) for name in found.split("|")}
    assert asked == {"slow", "nightly", "slurm"}
    given = re.compile(rf"mark\.({'|'.join(asked)})\b")
    helpers = [path for path in TESTS.parent.rglob("*.py") if not path.name.startswith("test_")]
    assert [str(path) for path in helpers if given.search(path.read_text(encoding="utf-8"))] == []
