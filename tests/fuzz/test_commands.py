"""A thousand damaged inputs and more, over all commands: what is refused is refused in a line, and touches nothing.

``pytest tests/fuzz --fuzz-seed 7 --fuzz-times 5`` tries others, and more of them.
"""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.serialize import to_plain
from gtpo_megatron.untrusted.text import shown
from tests.fuzz import mutations
from tests.fuzz.commands import Outcome, call, snapshot
from tests.fuzz.world import EVALUATE, SHARDS, config_of_run, here, make_world

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

INDEX = "model.safetensors.index.json"
STEP = "run/checkpoints/step_3"
OWN_NOTES = (
    "run/.lock",
    "run/run_state.json",
    "run/log.txt",
    "evaluated/.lock",
    "evaluated/log.txt",
    "run/launch",
    "run/hf",
)
"""What a command may write though it refuses: that it was started, and why it ended."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A command and files that it reads.

    Attributes:
        arguments: of the command.
        files: to damage, by how; see ``_damage``.
        inputs: how many damaged ones.
        tolerant: shows what it can and says what it cannot, with status 0.
    """

    arguments: tuple[str, ...]
    files: dict[str, str]
    inputs: int
    tolerant: bool = False


CONFIG = ("config", "run/config.yaml")
TARGETS = {
    "config: data": Target(
        arguments=CONFIG, files={"data/train.jsonl": "jsonl", "data/heldout.jsonl": "jsonl"}, inputs=80
    ),
    "config: config.yaml": Target(arguments=CONFIG, files={"run/config.yaml": "yaml"}, inputs=105),
    "config: model": Target(
        arguments=CONFIG,
        files={"model/config.json": "json", f"model/{INDEX}": "json", **{f"model/{name}": "header" for name in SHARDS}},
        inputs=105,
    ),
    "config: tokenizer": Target(
        arguments=CONFIG,
        files={
            "model/tokenizer.json": "json",
            "model/tokenizer_config.json": "json",
            "model/chat_template.jinja": "text",
        },
        inputs=45,
    ),
    "train --resume": Target(
        arguments=("train", "run/config.yaml", "--run-dir", "run", "--resume"),
        files={
            "run/config.yaml": "yaml",
            "run/data.json": "json",
            "run/metrics.jsonl": "jsonl",
            "run/run_state.json": "json",
            "run/checkpoints/latest": "text",
            f"{STEP}/manifest.json": "json",
            f"{STEP}/driver.json": "json",
        },
        inputs=75,
    ),
    "train --resume, unverified": Target(
        arguments=("train", "run/config.yaml", "--run-dir", "run", "--resume", "--checkpoint.verify", "none"),
        files={
            "run/checkpoints/latest": "text",
            f"{STEP}/driver.json": "json",
            f"{STEP}/unmeasured.json": "json",
            "run/data.json": "json",
        },
        inputs=45,
    ),
    "evaluate": Target(
        arguments=tuple(EVALUATE),
        files={
            "model/config.json": "json",
            "data/heldout.jsonl": "jsonl",
            "evaluated/verdicts.jsonl": "jsonl",
        },
        inputs=80,
    ),
    "status": Target(
        arguments=("status", "run"),
        files={
            "run/config.yaml": "yaml",
            "run/metrics.jsonl": "jsonl",
            "run/run_state.json": "json",
            "run/log.txt": "text",
            "run/.lock": "text",
            "run/checkpoints/latest": "text",
            f"{STEP}/manifest.json": "json",
            f"{STEP}/driver.json": "json",
        },
        inputs=105,
        tolerant=True,
    ),
    "report": Target(
        arguments=("report", "run", "--output", "out/report.html"),
        files={
            "run/config.yaml": "yaml",
            "run/metrics.jsonl": "jsonl",
            "run/data.json": "json",
            "run/rollouts/step_000001.jsonl": "jsonl",
            "run/log.txt": "text",
        },
        inputs=100,
        tolerant=True,
    ),
    "report: table": Target(
        arguments=("report", "run", "--output", "out/report.html", "--parquet", "out/responses.parquet"),
        files={"run/rollouts/step_000001.jsonl": "jsonl"},
        inputs=40,
        tolerant=True,
    ),
    "watch": Target(
        arguments=("watch", "run", "--port", "0"),
        files={"run/config.yaml": "yaml", "run/metrics.jsonl": "jsonl", "run/rollouts/step_000001.jsonl": "jsonl"},
        inputs=35,
        tolerant=True,
    ),
    "plan: correction": Target(
        arguments=("plan", "run/config.yaml", "--gpus", "8", "--correction", "preflight/plan_correction.json"),
        files={"preflight/plan_correction.json": "json"},
        inputs=45,
        tolerant=True,  # bytes that no GPU has are a plan in which nothing fits
    ),
    "plan": Target(
        arguments=("plan", "run/config.yaml", "--gpus", "8"),
        files={"run/config.yaml": "yaml", "model/config.json": "json"},
        inputs=45,
    ),
    "verify-resume": Target(
        arguments=("verify-resume", "run", "--output", "out"), files={"run/config.yaml": "yaml"}, inputs=30
    ),
    "study": Target(
        arguments=("study", "--table-only", "--num-steps", "2", "--output", "study", "--runs-dir", "out"),
        files={"study/runs.jsonl": "jsonl"},
        inputs=45,
    ),
    "contamination": Target(
        arguments=("contamination", "data/train.jsonl", "--benchmarks", "mine=data/heldout.jsonl"),
        files={"data/train.jsonl": "jsonl", "data/heldout.jsonl": "jsonl"},
        inputs=40,
    ),
    "contamination of JSON": Target(
        arguments=("contamination", "data/train.json", "--benchmarks", "mine=data/heldout.json"),
        files={"data/train.json": "json", "data/heldout.json": "json"},
        inputs=25,
    ),
    "hf-to-megatron": Target(
        arguments=("convert_checkpoint", "hf-to-megatron", "model", "out/made"),
        files={"model/config.json": "json", f"model/{INDEX}": "json", **{f"model/{name}": "header" for name in SHARDS}},
        inputs=50,
    ),
    "megatron-to-hf": Target(
        arguments=("convert_checkpoint", "megatron-to-hf", "run", "out/made"),
        files={"run/config.yaml": "yaml", "run/checkpoints/latest": "text", f"{STEP}/driver.json": "json"},
        inputs=40,
    ),
    "launchers.slurm": Target(
        arguments=(
            *("launchers.slurm", "run/config.yaml", "--run-dir", "out", "--dry-run"),
            *("--account", "a", "--partition", "p", "--nodes", "1", "--gpus-per-node", "0", "--time", "60"),
        ),
        files={"run/config.yaml": "yaml", "data/train.jsonl": "absent", "model/config.json": "json"},
        inputs=30,
    ),
    "launchers.local": Target(
        arguments=("launchers.local", "run/config.yaml", "--run-dir", "out", "--dry-run"),
        files={"run/config.yaml": "yaml", "data/train.jsonl": "absent", "model/config.json": "json"},
        inputs=30,
    ),
}


@dataclass
class World:
    """The folder that is damaged and mended again."""

    root: Path
    whole: Path
    before: dict = field(default_factory=dict)

    def mend(self) -> None:
        """Everything is as it was made."""
        now = snapshot(self.root)
        for name in sorted(now.keys() - self.before.keys(), reverse=True):
            path = self.root / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        for name in sorted(name for name, state in self.before.items() if now.get(name) != state):
            path, source = self.root / name, self.whole / name
            if path.is_dir() and not path.is_symlink() and not source.is_dir():
                shutil.rmtree(path)
            elif path.is_symlink() or path.exists():
                path.unlink()
            if source.is_dir():
                path.mkdir(exist_ok=True)
            else:
                shutil.copy2(source, path)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    whole = tmp_path_factory.mktemp("whole") / "world"
    whole.mkdir()
    make_world(whole)
    root = tmp_path_factory.mktemp("damaged") / "world"
    shutil.copytree(whole, root)
    with here(root):
        yield World(root=root, whole=whole, before=snapshot(root))


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_whole_is_accepted(world, name):
    try:
        outcome = call(TARGETS[name].arguments)
    finally:
        world.mend()
    assert outcome.is_accepted or (name == "status" and "stopped" in outcome.out), (outcome.err, outcome.crash)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("which", ["the first", pytest.param("all", marks=pytest.mark.nightly)])
def test_damaged_files(world, name, which, pytestconfig):
    seed, times = pytestconfig.getoption("fuzz_seed"), pytestconfig.getoption("fuzz_times")
    target, seen, failures = TARGETS[name], Counter(), []
    inputs = 1 if which == "the first" else target.inputs * times
    for number in range(inputs):
        rng = random.Random(f"{seed} {name} {number}")
        file = rng.choice(sorted(target.files))
        try:
            what, is_hostile = _damage(rng, world.root / file, target.files[file])
            before = snapshot(world.root)
            outcome = call(target.arguments)
            after = snapshot(world.root)
        finally:
            world.mend()
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        wrong = _wrong(target, outcome, changed, is_hostile=is_hostile)
        seen["accepted" if outcome.is_accepted else "refused"] += 1
        if wrong:
            failures.append(f"{name} #{number}: {file}: {what}: {wrong}")
    print(f"{name}: {dict(seen)}")
    assert not failures, f"{len(failures)} of {inputs}:\n" + "\n\n".join(failures)


def _wrong(target: Target, outcome: Outcome, changed: list[str], *, is_hostile: bool) -> str:
    if outcome.is_accepted:
        return "was accepted" if is_hostile and not target.tolerant else ""
    if target.tolerant and outcome.status == 1 and not outcome.crash and outcome.out:  # of a run that has failed
        return ""
    if complaint := outcome.complaint():
        return f"{complaint}\n{outcome.err[-2000:]}"
    touched = [name for name in changed if not name.startswith(OWN_NOTES)]
    return f"refused, and yet touched {touched}: {outcome.err}" if touched else ""


def _damage(rng: random.Random, path: Path, kind: str) -> tuple[str, bool]:
    """Damages a file; says how, and whether nobody could make sense of it."""
    how = "absent" if kind == "absent" else rng.choice(["value"] * 5 + ["content"] * 2 + ["hostile"] * 2 + ["no file"])
    if how in ("no file", "absent"):
        return mutations.replace_by_no_file(rng, path), False
    content = path.read_bytes()
    if how == "hostile":
        what, made = mutations.hostile_content(rng)
        path.write_bytes(made)
        return what, kind in ("json", "yaml", "header") and path.name not in OPTIONAL
    if kind == "header":
        what, made = mutations.damaged_header(rng, content)
    elif how == "content" or kind == "text":
        what, made = mutations.damaged_content(rng, content)
    else:
        what, made = _damaged_value(rng, content, kind)
    path.write_bytes(made)
    return what, False


OPTIONAL = (
    "run_state.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Whose damage is no reason not to go on."""


def _damaged_value(rng: random.Random, content: bytes, kind: str) -> tuple[str, bytes]:
    if kind == "yaml":
        what, text = mutations.damaged_value(rng, yaml.safe_load(content))
        return what, text.encode()  # JSON is YAML
    if kind == "json":
        what, text = mutations.damaged_value(rng, json.loads(content))
        return what, text.encode()
    lines = content.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    what, text = mutations.damaged_value(rng, json.loads(lines[number]))
    lines[number] = text.encode() + b"\n"
    return f"line {number + 1}: {what}", b"".join(lines)


def _options(plain: dict, parent: str = "") -> list[str]:
    """Every field of a configuration as an option."""
    found = []
    for name, value in plain.items():
        path = f"{parent}.{name}".strip(".")
        if isinstance(value, dict):
            found += _options(value, path)
        elif name != "kind":
            found.append(f"--{path.replace('_', '-')}")
    return found


RECIPES = (
    "",
    ":",
    "a:b",
    "os:getcwd",
    "recipes.tiny_cpu:nope",
    "recipes.tiny_cpu:gtpo:x",
    ".yaml",
    "nowhere.yaml",
    "run",
    "data/train.jsonl",
    "recipes..x:y",
    "x" * 300 + ".yaml",
    "x" * 300 + ":y",
    "a\0b.yaml",
    "data.yaml/x.yaml",
    "/dev/zero.yaml",
    "model/config.json",
    "json:nope.yaml",
)
COMMAND_LINES = {
    ("config", "run/config.yaml"): [],
    ("train", "run/config.yaml", "--run-dir", "run", "--resume"): ["--run-dir", "--resume"],
    ("train", "run/config.yaml", "--run-dir", "out"): ["--run-dir"],
    ("plan", "run/config.yaml", "--gpus", "8"): [
        "--gpus",
        "--gpu",
        "--gpu-memory",
        "--gpus-per-node",
        "--rollout-gpus",
        "--host-memory",
        "--mean-prompt-tokens",
    ],
    ("verify-resume", "run", "--output", "out"): ["--steps", "--kill-after", "--output"],
    ("launchers.local", "run/config.yaml", "--run-dir", "out", "--dry-run"): ["--run-dir"],
    tuple(EVALUATE): ["--benchmarks", "--samples", "--against", "--checkpoint", "--ks", "--output"],
    ("evaluate", "run", "--benchmarks", "mine=data/heldout.jsonl", "--samples", "2"): ["--checkpoint"],
    ("status", "run"): [],
    ("report", "run", "--output", "out.html"): ["--output"],
    ("watch", "run", "--port", "0"): ["--port"],
    ("study", "--table-only", "--num-steps", "2", "--output", "study", "--runs-dir", "out"): [
        "--arms",
        "--num-seeds",
        "--num-steps",
        "--baseline",
        "--minutes",
        "--output",
        "--runs-dir",
        "--study",
    ],
    ("contamination", "data/train.jsonl", "--benchmarks", "mine=data/heldout.jsonl"): ["--benchmarks", "--ngram-words"],
    ("convert_checkpoint", "hf-to-megatron", "model", "out/made"): [
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
    ],
    ("convert_checkpoint", "megatron-to-hf", "run", "out/made"): ["--shard-mib", "--model"],
}
WITH_RECIPE = ("config", "train", "plan", "launchers.local")
NUM_COMMAND_LINES = 300


def _command_line(rng: random.Random, fields: dict[str, list[str]]) -> list[str]:
    base = rng.choice(list(COMMAND_LINES))
    arguments, word = list(base), rng.choice(mutations.BAD_WORDS)
    kind = rng.choice(["option"] * 5 + ["word", "more", "drop", "misspelt"])
    own = COMMAND_LINES[base] + COMMAND_LINES[base] + rng.sample(fields.get(base[0], ["--x"]), 1)
    option = rng.choice(own)
    if kind == "word":
        at = rng.randrange(1, len(arguments))
        arguments[at] = rng.choice(RECIPES) if at == 1 and base[0] in WITH_RECIPE else word
    elif kind == "more":
        arguments.insert(rng.randrange(1, len(arguments) + 1), word)
    elif kind == "drop":
        del arguments[rng.randrange(1, len(arguments))]
    else:
        if kind == "misspelt":
            option = option[:-1] + rng.choice(["x", ".", "--", "=", "\n", ""])
        arguments += [f"{option}={word}"] if rng.random() < 0.5 else [option, word]
    return arguments


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(2))
def test_command_lines(world, part, pytestconfig):
    seed, times = pytestconfig.getoption("fuzz_seed"), pytestconfig.getoption("fuzz_times")
    plain = to_plain(config_of_run())
    fields = {name: _options(plain) for name in (*WITH_RECIPE, "verify-resume")}
    fields["evaluate"] = _options(to_plain(EvaluateConfig(benchmarks=("x=y",))))
    failures, seen = [], Counter()
    for number in range(part, NUM_COMMAND_LINES * times, 2):
        arguments = _command_line(random.Random(f"{seed} {number}"), fields)
        before = snapshot(world.root)
        try:
            outcome = call(arguments)
            after = snapshot(world.root)
        finally:
            world.mend()
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        wrong = _wrong(
            TARGETS["status"] if arguments[0] == "status" else TARGETS["config: data"],
            outcome,
            changed,
            is_hostile=False,
        )
        seen["accepted" if outcome.is_accepted else "refused"] += 1
        if wrong:
            failures.append(f"#{number}: {[shown(one) for one in arguments]}: {wrong}")
    print(f"command lines: {dict(seen)}")
    assert not failures, f"{len(failures)}:\n" + "\n\n".join(failures)


def test_no_command_line_leads_out_of_the_temporary_folder():
    """Some of these commands write where they are told to."""
    for word in mutations.BAD_WORDS:
        assert not word.startswith(("/", "~")) or word in ("/dev/null", "/dev/full"), word


def test_there_are_a_thousand_inputs_and_more():
    assert sum(target.inputs for target in TARGETS.values()) + NUM_COMMAND_LINES >= 1200
