"""One training step on one CPU rank, in this working tree and in another one, in turns.

    git worktree add /tmp/before 70769b3
    python -m benchmarks.training_step --against /tmp/before --output step.json

A process of its own per tree and turn makes the same steps from the same seeded responses: scoring, credit, one update
of the quickstart's model. Times are of the CPU, of one thread, so that neighbours on the machine count little; a ratio
is of the two medians of a turn, and the median over turns counts. Bit-equality is ``tests/golden``'s to say; here the
gradient norms of both trees must agree.
"""

import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("score", "credit", "update", "step")
PROMPT_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        against: the other working tree.
        output: JSON file to write.
        turns: of both trees, alternating which is first.
        rounds: steps that a process is timed for, after two that are not.
        responses: of a step.
        response_tokens: of each.
    """

    against: Path
    output: Path
    turns: int = 5
    rounds: int = 7
    responses: int = 32
    response_tokens: int = 96


def steps(responses: int, response_tokens: int, rounds: int) -> dict[str, Any]:
    """Medians over the steps of this process; the modules are those of the tree that ``sys.path`` begins with."""
    import torch

    from gtpo_megatron.batch import RewardBatch, RolloutBatch, RolloutShard
    from gtpo_megatron.config.parallel import ParallelConfig
    from recipes import tiny_cpu

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    batch = RolloutBatch(
        prompt_ids=torch.randint(3, 339, (responses, PROMPT_TOKENS), generator=generator),
        prompt_lengths=torch.full((responses,), PROMPT_TOKENS),
        response_ids=torch.randint(3, 339, (responses, response_tokens), generator=generator),
        response_lengths=torch.full((responses,), response_tokens),
        loss_mask=torch.ones(responses, response_tokens, dtype=torch.bool),
        rollout_logprobs=torch.zeros(responses, response_tokens),
        group_ids=torch.arange(responses) // 8,
        truncated=torch.zeros(responses, dtype=torch.bool),
        policy_version=0,
    )
    rewards = RewardBatch(
        rewards=(torch.arange(responses) % 3 == 0).float(), failed=torch.zeros(responses, dtype=torch.bool)
    )
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # Megatron warns of every optional kernel it lacks
        from gtpo_megatron.actor.actor import MegatronActor
        from gtpo_megatron.observability.metrics import to_scalars

        config = replace(tiny_cpu.gtpo(), parallel=ParallelConfig(num_ranks=1))
        actor = MegatronActor(config, global_rank=0, init_method=f"file://{folder}/store")
        found: list[dict[str, float]] = []
        norm = 0.0
        for _ in range(rounds + 2):
            times = [time.process_time()]
            actor.score_tokens(RolloutShard.of(batch, range(responses)))
            times.append(time.process_time())
            actor.credit_tokens(rewards)
            times.append(time.process_time())
            norm = to_scalars(actor.update(0))["optimizer/grad_norm"]  # not a newer policy for the next round
            times.append(time.process_time())
            parts = [after - before for before, after in itertools.pairwise(times)]
            found.append(dict(zip(STAGES, [*parts, sum(parts)], strict=True)))
        actor.close()
    medians = {f"{name}_s": statistics.median(one[name] for one in found[2:]) for name in STAGES}
    return {**medians, "grad_norm": norm}


def of_tree(tree: Path, options: Options) -> dict[str, Any]:
    """One process of a tree."""
    sizes = [str(options.responses), str(options.response_tokens), str(options.rounds)]
    command = [sys.executable, str(Path(__file__).resolve()), "--steps", str(tree.resolve()), *sizes]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree}:\n{done.stderr[-3000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--steps"]:
        sys.path[:1] = [arguments[1]]  # in the place of this file's folder
        package = importlib.import_module("gtpo_megatron").__file__ or ""
        if not Path(package).is_relative_to(arguments[1]):
            raise SystemExit(f"{package} was imported, not the package of {arguments[1]}")
        responses, response_tokens, rounds = map(int, arguments[2:])
        print(json.dumps(steps(responses, response_tokens, rounds)))
        return
    options = tyro.cli(Options, description=__doc__, args=arguments)
    turns = []
    for turn in range(options.turns):
        order = (("here", ROOT), ("against", options.against))
        turns.append({name: of_tree(tree, options) for name, tree in (order if turn % 2 == 0 else order[::-1])})
        here, other = turns[-1]["here"], turns[-1]["against"]
        if here["grad_norm"] != other["grad_norm"]:
            raise SystemExit(f"gradient norms differ: {here['grad_norm']} here, {other['grad_norm']} there")
        print(f"turn {turn}: {here['step_s']:.3f} s here, {other['step_s']:.3f} s there", flush=True)
    ratios = {
        f"{stage}_ratio": statistics.median(
            turn["here"][f"{stage}_s"] / turn["against"][f"{stage}_s"] for turn in turns
        )
        for stage in STAGES
    }
    trees = {
        name: {f"{stage}_s": statistics.median(t[name][f"{stage}_s"] for t in turns) for stage in STAGES}
        for name in ("here", "against")
    }
    result = {
        "options": {name: value.name if isinstance(value, Path) else value for name, value in asdict(options).items()},
        "turns": turns,
        "medians": trees,
        **ratios,
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for stage in STAGES:
        print(f"{stage:7} {ratios[f'{stage}_ratio']:.3f}   (here over there)")


if __name__ == "__main__":
    main(sys.argv[1:])
