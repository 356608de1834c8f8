"""Forward and backward of the Megatron actor on one CPU rank, beside ``transformers`` and beside padding.

    python -m benchmarks.actor --json actor.json

Three questions: what the actor takes for the log-probs of a batch and the gradient of their mean, in multiples of what
``transformers`` takes for the same weights, tokens and threads (all responses equally long, so nobody pads; the actor
makes the entropies as well, which ``transformers`` is not asked for); how much faster it is to pack a batch whose
lengths differ than to pad every sequence to the longest; and what it takes to run a prompt once for its eight
responses, in multiples of what it takes to run it with each (``--prompt-tokens`` of ``--max-tokens``). Every round
measures all of them, one after the other; a ratio is the median over rounds of the ratio within a round. One thread is
measured in CPU time of the process, so that neighbours on the machine do not count; several in time on the wall, since
threads that wait for each other burn CPU.
"""

import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
import tyro
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch, mask_of_lengths
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.data.packing import PackedMicroBatch, PackLayout, micro_batches, pack
from recipes import tiny_cpu

PROMPT_TOKENS, GROUP_SIZE = 32, 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """The batch and the number of rounds.

    Attributes:
        responses: sequences of a batch.
        max_tokens: longest sequence, prompt included.
        prompt_tokens: of every prompt.
        threads: of torch, for all.
        rounds: repetitions.
        model: folder in Hugging Face format; empty: the quickstart's.
        json: file to write; empty: standard output only.
        profile: print the actor's operators instead, most expensive first.
    """

    responses: int = 32
    max_tokens: int = 128
    prompt_tokens: int = PROMPT_TOKENS
    threads: int = 1
    rounds: int = 9
    model: str = ""
    json: str = ""
    profile: bool = False


def make_batch(lengths: list[int], *, prompt_tokens: int = PROMPT_TOKENS) -> RolloutBatch:
    """Seeded responses of the given lengths, each group to one prompt."""
    generator = torch.Generator().manual_seed(0)
    rows, longest = len(lengths), max(lengths)
    prompts = torch.randint(3, 339, (-(-rows // GROUP_SIZE), prompt_tokens), generator=generator)
    return RolloutBatch(
        prompt_ids=prompts.repeat_interleave(GROUP_SIZE, 0)[:rows],
        prompt_lengths=torch.full((rows,), prompt_tokens),
        response_ids=torch.randint(3, 339, (rows, longest), generator=generator),
        response_lengths=torch.tensor(lengths),
        loss_mask=mask_of_lengths(torch.tensor(lengths), longest),
        rollout_logprobs=torch.zeros(rows, longest),
        group_ids=torch.arange(rows) // GROUP_SIZE,
        truncated=torch.zeros(rows, dtype=torch.bool),
        policy_version=0,
    )


def skewed(options: Options) -> list[int]:
    """Response lengths as reasoning models make them: most are short, a few reach the limit."""
    longest = options.max_tokens - options.prompt_tokens
    return [longest if row % 8 == 0 else max(1, longest // 8 + row % 13) for row in range(options.responses)]


class Actor:
    """One Megatron rank with the quickstart's model, or another.

    Args:
        folder: for the file through which ranks meet.
        model: folder in Hugging Face format; empty: the quickstart's.
        dtype: of the weights.
    """

    def __init__(self, folder: str, *, model: str = "", dtype: Literal["float32", "bfloat16"] = "float32") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns of every optional kernel it lacks
            from gtpo_megatron.actor.actor import MegatronActor

            base = tiny_cpu.gtpo()
            settings = replace(base.model, path=model or base.model.path, dtype=dtype)
            config = replace(base, model=settings, parallel=ParallelConfig(num_ranks=1))
            self.actor = MegatronActor(config, global_rank=0, init_method=f"file://{folder}/store")

    def step(self, batch: RolloutBatch, *, padded_to: int = 1, min_prefix_tokens: int = 0) -> float:
        """Gradient of the mean negative log-prob; its value."""
        from gtpo_megatron.actor.forward_backward import run_micro_batches

        layout = PackLayout(document_multiple=padded_to, multiple=padded_to, min_prefix_tokens=min_prefix_tokens)
        cut = micro_batches(batch, range(batch.num_responses), budget_tokens=1 << 20, layout=layout)
        count = int(batch.response_lengths.sum())

        def finish(hidden: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, float]:
            loss = -self.actor._head.score(hidden, micro).logprobs.sum() / count
            return loss, float(loss.detach())

        for chunk in self.actor._model:
            chunk.zero_grad_buffer()
        return sum(run_micro_batches(self.actor._model, cut, finish, forward_only=False))


def transformers_step(model: Any, batch: RolloutBatch) -> float:
    """The same by ``transformers``; all rows equally long."""
    ids = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)
    model.zero_grad(set_to_none=True)
    logits = model(ids, use_cache=False).logits[:, batch.prompt_ids.shape[1] - 1 : -1]
    loss = F.cross_entropy(logits.flatten(0, 1), batch.response_ids.flatten())
    loss.backward()
    return float(loss.detach())


def seconds(function: Callable[[], object], *, threads: int) -> float:
    """Time of one call: of the CPU for one thread, on the wall for several."""
    clock = time.process_time if threads == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


def measure(options: Options) -> dict[str, Any]:
    """Seconds and ratios."""
    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model or tiny_cpu.gtpo().model.path, dtype=torch.float32
    )
    even, uneven = (
        make_batch(lengths, prompt_tokens=options.prompt_tokens)
        for lengths in ([options.max_tokens - options.prompt_tokens] * options.responses, skewed(options))
    )
    with tempfile.TemporaryDirectory() as folder:
        actor = Actor(folder, model=options.model)
        torch.set_num_threads(options.threads)
        ours, theirs = actor.step(even), transformers_step(model, even)
        if abs(ours - theirs) > 1e-4 * theirs:
            raise SystemExit(f"the losses differ: actor {ours}, transformers {theirs}")
        candidates: dict[str, Callable[[], float]] = {
            "actor": lambda: actor.step(even),
            "transformers": lambda: transformers_step(model, even),
            "packed": lambda: actor.step(uneven),
            "padded": lambda: actor.step(uneven, padded_to=options.max_tokens),
            "shared": lambda: actor.step(even, min_prefix_tokens=1),
        }
        for candidate in candidates.values():
            candidate()
        if options.profile:
            with torch.profiler.profile() as profile:
                actor.step(even)
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40))
        rounds = [
            {name: seconds(call, threads=options.threads) for name, call in candidates.items()}
            for _ in range(options.rounds)
        ]
        actor.actor.close()
    return {
        "seconds": {name: statistics.median(one[name] for one in rounds) for name in candidates},
        "actor_over_transformers": statistics.median(one["actor"] / one["transformers"] for one in rounds),
        "shared_over_own_prompts": statistics.median(one["shared"] / one["actor"] for one in rounds),
        "padded_over_packed": statistics.median(one["padded"] / one["packed"] for one in rounds),
        "tokens": {
            "even": options.responses * options.max_tokens,
            "even_shared": len(pack(even, range(options.responses), layout=PackLayout(min_prefix_tokens=1)).input_ids),
            "uneven_packed": int((uneven.prompt_lengths + uneven.response_lengths).sum()),
            "uneven_padded": options.responses * options.max_tokens,
        },
    }


def main() -> None:
    """Measures and prints."""
    options = tyro.cli(Options, description=__doc__)
    result = {
        "options": asdict(options),
        "machine": f"{platform.machine()}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "result": measure(options),
        "targets": {"actor_over_transformers": "at most 1.3", "padded_over_packed": "at least 1.3"},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
