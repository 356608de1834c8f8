"""One step of the recipe on its own processes: push, generate, grade, score and compare, update."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gtpo_megatron.batch import PromptBatch
from gtpo_megatron.companions.preflight.expectations import TIME_FACTOR, Expectations, gib, rate
from gtpo_megatron.companions.preflight.finding import Finding, assessed, not_here, noted
from gtpo_megatron.companions.preflight.room import Room
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.errors import WorkerError
from gtpo_megatron.mismatch.gate import MismatchGate
from gtpo_megatron.mismatch.statistics import GAP, KL
from gtpo_megatron.observability.metrics import Metric, to_scalars

FEW_TOKENS = 16
"""Of a first generation, which warms the engines up and says how long a token takes."""

GENERATION_SHARE = 0.15
"""Of the whole time that the generation may take."""


def push(room: Room) -> Iterator[Finding]:
    """Two pushes over the recipe's transport: the first is compared tensor by tensor, the second is timed alone."""
    turns = room.turns
    turns.engine()
    verified_s = turns.seconds["push"]
    turns.trainer()
    turns.updated()  # another version, which need not be compared
    turns.engine()
    room.seconds["push"] = turns.seconds["push"]
    yield pushed(
        room.transport,
        num_bytes=room.pushed_bytes,
        verified_s=verified_s,
        plain_s=turns.seconds["push"],
        expected=room.expected,
    )


def pushed(transport: str, *, num_bytes: int, verified_s: float, plain_s: float, expected: Expectations) -> Finding:
    """A push that has arrived as it was sent; one that has not has raised.

    Args:
        transport: name.
        num_bytes: that all engines together received.
        verified_s: of the push whose checksums were compared.
        plain_s: of one without.
        expected: seconds by the plan.
    """
    measured = (
        f"checksums agree; {gib(num_bytes)} in {plain_s:.2f} s, {rate(num_bytes / plain_s)} ({verified_s:.2f} s with "
        f"checksums)"
    )
    figures = {"bytes": float(num_bytes), "bytes_per_s": num_bytes / plain_s, "seconds": plain_s}
    planned = expected.time.push if expected.time else None
    return assessed(
        f"push over {transport}",
        measured,
        is_good=planned is None or plain_s <= TIME_FACTOR * planned,
        expected="equal checksums" if planned is None else f"equal checksums, within {TIME_FACTOR * planned:.2f} s",
        remedy="slower than the plan: compare the check clocks (copies between GPU and host) and collectives; larger "
        "--weight-sync.bucket-mib helps where buckets are many",
        figures=figures,
    )


def generate(room: Room) -> Iterator[Finding]:
    """The step's prompts through the engines, as many responses as a step has, as long as the time allows."""
    stages, config = room.running, room.config
    if room.inputs is None:
        raise WorkerError("the problems were not read; see the check inputs")
    room.turns.engine()
    count = config.data.prompts_per_step
    prompts = PromptBatch(
        problems=tuple(PromptSampler(room.inputs.train, config.seed).next(count)), group_ids=tuple(range(count))
    )
    longest = config.rollout.sampling.max_response_tokens

    def sample(tokens: int) -> float:
        began = time.perf_counter()
        room.sampled = stages.engine.generate(
            prompts,
            _up_to(config.rollout.sampling, tokens),
            samples_per_prompt=config.rollout.group_size,
            seed=config.seed,
        )
        return time.perf_counter() - began

    few_s = sample(min(FEW_TOKENS, longest))
    stages.engine.forget_prefixes()
    tokens = affordable_tokens(longest, few_s=few_s, limit_s=GENERATION_SHARE * room.runner.budget.seconds)
    with room.memory.phase("generate"):
        seconds = sample(tokens)
    assert room.sampled is not None
    room.prompts = prompts
    lengths = room.sampled.own_lengths.double()
    own, total = float(lengths.sum()), len(lengths)
    is_whole = tokens == longest
    room.mean_prompt = float(room.sampled.prompt_lengths.double().mean())
    room.mean_response = own / total if is_whole else longest / 2
    room.seconds["generate"] = seconds if is_whole else room.mean_response * total * seconds / own
    cut = "" if is_whole else f", cut at {tokens} of {longest} tokens: longer contexts are slower"
    planned = room.expected.time
    figures = {"tokens_per_s": own / seconds, "seconds": seconds, "mean_response_tokens": own / total}
    measured = f"{own / seconds:,.0f} tokens/s, {total} responses of {own / total:.0f} tokens in {seconds:.1f} s{cut}"
    if planned is None:
        yield noted("generation", measured, why=room.expected.why_no_rates, figures=figures)
        return
    request = room.expected.request
    assert request is not None
    least = request.batch.num_responses * request.batch.mean_response_tokens / planned.generate / TIME_FACTOR
    yield assessed(
        "generation",
        measured,
        is_good=own / seconds >= least,
        expected=f"at least {least:,.0f} tokens/s",
        remedy="larger --rollout.max-concurrent-sequences and --rollout.kv-cache-mib decode more at once; look at the "
        "check clocks",
        figures=figures,
    )


def _up_to(sampling: SamplingConfig, tokens: int) -> SamplingConfig:
    return replace(sampling, max_response_tokens=tokens)


def affordable_tokens(longest: int, *, few_s: float, limit_s: float) -> int:
    """Tokens a response for which there is time, by the seconds of ``FEW_TOKENS``, prompts included."""
    each = few_s / min(FEW_TOKENS, longest)
    return max(min(FEW_TOKENS, longest), min(longest, int(limit_s / each)))


def rewards(room: Room) -> Iterator[Finding]:
    """The recipe's reward function on the sampled responses."""
    assert room.sampled is not None
    assert room.prompts is not None
    began = time.perf_counter()
    room.rewards = room.running.reward.grade(room.sampled, room.prompts)
    seconds = time.perf_counter() - began
    room.seconds["reward"] = seconds
    total, failed = len(room.rewards.failed), int(room.rewards.failed.sum())
    mean = float(room.rewards.rewards[~room.rewards.failed].mean()) if failed < total else math.nan
    yield assessed(
        "rewards",
        f"{total / seconds:,.0f} responses/s, mean {mean:.3g}, {failed} without a verdict",
        is_good=failed == 0,
        expected="a verdict on every response",
        remedy="log.txt says what the reward function raised; too slow: --reward.num-workers or --reward.timeout-s",
        figures={"seconds": seconds, "failed": float(failed)},
    )


def logprobs(room: Room) -> Iterator[Finding]:
    """The engines' log-probs of their own tokens against the trainer's."""
    assert room.sampled is not None
    stages = room.running
    room.turns.trainer()
    has_scoring_pass = room.config.rollout.entropy_source == "actor"
    score = stages.trainer.score_tokens if has_scoring_pass else stages.trainer.use_sampler_scores
    metrics = score(room.sampled)
    if has_scoring_pass:
        yield mismatch("log-probs of sampler and trainer, first weights", metrics, room.gate)
    else:
        yield not_here(
            "log-probs of sampler and trainer, first weights",
            "rollout.entropy_source='rollout' has no scoring pass; the check update compares them",
        )


def mismatch(what: str, metrics: Mapping[str, Metric], gate: MismatchGate) -> Finding:
    """The mismatch figures against the recipe's own limits."""
    result = gate.assess(metrics, is_verified=True)
    scalars = to_scalars({name: metrics[name] for name in (GAP, f"{GAP}_mean", f"{GAP}_max", KL)})
    limits = to_scalars({name: metric for name, metric in result.metrics.items() if name.endswith("_limit")})
    figures = {
        "mean_nats": scalars[f"{GAP}_mean"],
        "p99_nats": scalars[f"{GAP}_p99"],
        "max_nats": scalars[f"{GAP}_max"],
    }
    return assessed(
        what,
        "; ".join(result.broken)
        or f"mean {figures['mean_nats']:.2g} nats, 99% within {figures['p99_nats']:.2g}, all within "
        f"{figures['max_nats']:.2g}, KL {scalars[KL]:.2g}",
        is_good=not result.broken,
        expected=f"mean at most {limits[f'{GAP}_mean_limit']:.2g}, 99% {limits[f'{GAP}_p99_limit']:.2g}",
        remedy="the sampler is not the trainer's policy: docs/mismatch.md has the usual causes",
        figures=figures,
    )


def update(room: Room) -> Iterator[Finding]:
    """Credit and one step's updates from the sampled responses, then the new weights to the engines."""
    assert room.rewards is not None
    stages = room.running
    stages.trainer.credit_tokens(room.rewards)
    metrics = stages.trainer.update(step=room.turns.version + 1)
    room.turns.updated()
    if room.config.rollout.entropy_source == "rollout":
        yield mismatch("log-probs of sampler and trainer, first weights", metrics, room.gate)
    stages.trainer.release_batch()
    scalars = to_scalars(metrics)
    loss, norm, skipped = (scalars[name] for name in ("policy/loss", "optimizer/grad_norm", "optimizer/skipped_count"))
    yield assessed(
        "an update from the sampled responses",
        f"loss {loss:.3g}, gradient norm {norm:.3g}, {skipped:.0f} skipped",
        is_good=math.isfinite(loss) and math.isfinite(norm) and skipped == 0,
        expected="finite, none skipped",
        remedy="see the checks clocks, kernels and layer; if they passed, the learning rate or the model's weights",
        figures={"loss": loss, "grad_norm": norm},
    )


def new_weights(room: Room) -> Iterator[Finding]:
    """A push after an update, and the engines' log-probs under the new weights against the trainer's."""
    assert room.prompts is not None
    stages, config = room.running, room.config
    room.turns.engine()
    tokens = min(config.rollout.sampling.max_response_tokens, 4 * FEW_TOKENS)
    room.sampled = stages.engine.generate(
        room.prompts, _up_to(config.rollout.sampling, tokens), samples_per_prompt=1, seed=config.seed
    )
    stages.engine.forget_prefixes()
    room.turns.trainer()
    metrics = stages.trainer.score_tokens(room.sampled)
    stages.trainer.release_batch()
    yield mismatch("log-probs of sampler and trainer, updated weights", metrics, room.gate)
