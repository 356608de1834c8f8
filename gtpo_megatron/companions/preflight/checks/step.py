"""One step of the recipe on its own processes: push, generate, grade, score and compare, update."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gtpo_megatron.batch import PromptBatch, RewardBatch
from gtpo_megatron.companions.preflight.context import StepContext
from gtpo_megatron.companions.preflight.expectations import TIME_FACTOR, Expectations, gib, rate
from gtpo_megatron.companions.preflight.result import CheckResult, assessed, bounded, not_here
from gtpo_megatron.companions.preflight.runner import Results
from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.mismatch.gate import MismatchGate
from gtpo_megatron.mismatch.statistics import GAP, KL, SCALED
from gtpo_megatron.observability.metrics import Metric, to_scalars
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.weights.adapter_shapes import num_parameters
from gtpo_megatron.weights.push.wire import wire_dtype
from gtpo_megatron.weights.reshard import hf_shapes

FEW_TOKENS = 16
"""Of a first generation, which warms the engines up and says how long a token takes."""

GENERATION_SHARE = 0.15
"""Of the whole time that the generation may take."""

FIRST_WEIGHTS = "log-probs of sampler and trainer, first weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRollouts:
    """Responses of a step.

    Attributes:
        prompts: prompts of the step.
        handle: handle of the responses.
        mean_tokens: mean of prompt and response; of the response half the limit where responses were cut.
        seconds: time of the generation at that mean.
    """

    prompts: PromptBatch
    handle: RolloutHandle
    mean_tokens: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """Rewards of the responses, and the seconds that they took."""

    rewards: RewardBatch
    seconds: float


def push(context: StepContext) -> Results:
    """Two pushes over the recipe's transport: the first is compared tensor by tensor, the second is timed alone.

    Returns:
        Seconds of a push.
    """
    gpus = context.gpus
    gpus.to_engine()
    verified_s = gpus.seconds["push"]
    gpus.to_trainer()
    gpus.count_update()  # another version, which need not be compared
    gpus.to_engine()
    plain_s = gpus.seconds["push"]
    transport = context.config.transport(has_gpus=context.has_gpus)
    yield pushed(
        transport,
        num_bytes=pushed_bytes(context),
        verified_s=verified_s,
        plain_s=plain_s,
        expected=context.expected,
    )
    return plain_s


def pushed_bytes(context: StepContext) -> int:
    """Bytes of a push: the whole model, or the adapters alone, into every engine, in the dtype that travels."""
    config, arch = context.config, context.architecture
    if config.adapter.pushes_alone:
        elements = num_parameters(arch, config.adapter)
    else:
        elements = sum(math.prod(shape) for shape in hf_shapes(arch).values())
    itemsize = ELEMENT_BYTES[wire_dtype(config.model.dtype, config.rollout.activation_dtype)]
    return elements * itemsize * config.rollout.num_engines


def pushed(transport: str, *, num_bytes: int, verified_s: float, plain_s: float, expected: Expectations) -> CheckResult:
    """A push that has arrived as it was sent; one that has not has raised.

    Args:
        transport: name.
        num_bytes: bytes that all engines together received.
        verified_s: time of the push whose checksums were compared.
        plain_s: time of one without.
        expected: seconds by the plan.
    """
    measured = (
        f"checksums agree; {gib(num_bytes)} in {plain_s:.2f} s, {rate(num_bytes / plain_s)} ({verified_s:.2f} s with "
        f"checksums)"
    )
    planned = expected.time.push if expected.time else None
    return assessed(
        f"push over {transport}",
        measured,
        is_good=planned is None or plain_s <= TIME_FACTOR * planned,
        expected="equal checksums" if planned is None else f"equal checksums, within {TIME_FACTOR * planned:.2f} s",
        remedy="slower than the plan: compare the check clocks (copies between GPU and host) and collectives; larger "
        "--weight-sync.bucket-mib helps where buckets are many",
        figures={"bytes": float(num_bytes), "bytes_per_s": num_bytes / plain_s, "seconds": plain_s},
    )


def generate(context: StepContext) -> Results:
    """The step's prompts through the engines, as many responses as a step has, as long as the time allows.

    Returns:
        What was sampled.
    """
    engine, config = context.stages.engine, context.config
    context.gpus.to_engine()
    count = config.data.prompts_per_step
    sampler = PromptSampler(context.values["inputs"].train, config.seed)
    prompts = PromptBatch(problems=tuple(sampler.next(count)), group_ids=tuple(range(count)))
    longest = config.rollout.sampling.max_response_tokens

    def sample(tokens: int) -> tuple[RolloutHandle, float]:
        began = time.perf_counter()
        handle = engine.generate(
            prompts,
            _up_to(config.rollout.sampling, tokens),
            samples_per_prompt=config.rollout.group_size,
            seed=config.seed,
        )
        return handle, time.perf_counter() - began

    _, few_s = sample(min(FEW_TOKENS, longest))
    engine.forget_prefixes()
    tokens = affordable_tokens(longest, few_s=few_s, limit_s=GENERATION_SHARE * context.seconds)
    with context.memory.phase("generate"):
        handle, seconds = sample(tokens)
    lengths = handle.own_lengths.double()
    own, total = float(lengths.sum()), len(lengths)
    is_whole = tokens == longest
    mean_response = own / total if is_whole else longest / 2
    cut = "" if is_whole else f", cut at {tokens} of {longest} tokens: longer contexts are slower"
    request, planned = context.expected.request, context.expected.time
    least = 0.0
    if request is not None and planned is not None:
        least = request.batch.num_responses * request.batch.mean_response_tokens / planned.generate / TIME_FACTOR
    yield bounded(
        "generation",
        f"{own / seconds:,.0f} tokens/s, {total} responses of {own / total:.0f} tokens in {seconds:.1f} s{cut}",
        is_good=own / seconds >= least,
        expected=f"at least {least:,.0f} tokens/s",
        remedy="larger --rollout.max-concurrent-sequences and --rollout.kv-cache-mib decode more at once; look at the "
        "check clocks",
        unknown=context.expected.why_no_rates if planned is None else None,
        figures={"tokens_per_s": own / seconds, "seconds": seconds, "mean_response_tokens": own / total},
    )
    return ProbeRollouts(
        prompts=prompts,
        handle=handle,
        mean_tokens=float(handle.prompt_lengths.double().mean()) + mean_response,
        seconds=seconds if is_whole else mean_response * total * seconds / own,
    )


def _up_to(sampling: SamplingConfig, tokens: int) -> SamplingConfig:
    return replace(sampling, max_response_tokens=tokens)


def affordable_tokens(longest: int, *, few_s: float, limit_s: float) -> int:
    """Tokens a response for which there is time, by the seconds of ``FEW_TOKENS``, prompts included."""
    each = few_s / min(FEW_TOKENS, longest)
    return max(min(FEW_TOKENS, longest), min(longest, int(limit_s / each)))


def rewards(context: StepContext) -> Results:
    """The recipe's reward function on the sampled responses.

    Returns:
        ``Graded``.
    """
    sampled: ProbeRollouts = context.values["generate"]
    began = time.perf_counter()
    batch = context.stages.grade(sampled.handle, sampled.prompts)
    seconds = time.perf_counter() - began
    total, failed = len(batch.failed), int(batch.failed.sum())
    mean = float(batch.rewards[~batch.failed].mean()) if failed < total else math.nan
    yield assessed(
        "rewards",
        f"{total / seconds:,.0f} responses/s, mean {mean:.3g}, {failed} without a verdict",
        is_good=failed == 0,
        expected="a verdict on every response",
        remedy="log.txt says what the reward function raised; too slow: --reward.num-workers or --reward.timeout-s",
        figures={"seconds": seconds, "failed": float(failed)},
    )
    return Graded(rewards=batch, seconds=seconds)


def logprobs(context: StepContext) -> Results:
    """The engines' log-probs of their own tokens against the trainer's.

    Returns:
        The recipe's limits of the mismatch.
    """
    sampled: ProbeRollouts = context.values["generate"]
    gate = MismatchGate.of_run(context.config, has_experts=context.architecture.experts is not None)
    context.gpus.to_trainer()
    trainer = context.stages.trainer
    if context.config.rollout.entropy_source == "actor":
        yield mismatch(FIRST_WEIGHTS, trainer.score_tokens(sampled.handle), gate)
    else:
        trainer.use_sampler_scores(sampled.handle)
        yield not_here(
            FIRST_WEIGHTS, "rollout.entropy_source='rollout' has no scoring pass; the check update compares them"
        )
    return gate


def mismatch(what: str, metrics: Mapping[str, Metric], gate: MismatchGate) -> CheckResult:
    """The mismatch figures against the recipe's own limits."""
    assessment = gate.assess(metrics, is_verified=True)
    scalars = to_scalars({name: metrics[name] for name in (GAP, f"{GAP}_mean", f"{GAP}_max", KL)})
    limits = to_scalars({name: metric for name, metric in assessment.metrics.items() if name.endswith("_limit")})
    figures = {
        "mean_nats": scalars[f"{GAP}_mean"],
        "p99_nats": scalars[f"{GAP}_p99"],
        "max_nats": scalars[f"{GAP}_max"],
    }
    return assessed(
        what,
        "; ".join(assessment.broken)
        or f"mean {figures['mean_nats']:.2g} nats, 99% within {figures['p99_nats']:.2g}, all within "
        f"{figures['max_nats']:.2g}, KL {scalars[KL]:.2g}",
        is_good=not assessment.broken,
        expected=f"an error of the logits of at most {limits[f'{SCALED}_limit']:.2g} nats",
        remedy="the sampler is not the trainer's policy: docs/mismatch.md has the usual causes",
        figures=figures,
    )


def update(context: StepContext) -> Results:
    """Credit and one step's updates from the sampled responses."""
    graded: Graded = context.values["rewards"]
    trainer = context.stages.trainer
    trainer.credit_tokens(graded.rewards)
    metrics = trainer.update(step=context.gpus.version + 1)
    context.gpus.count_update()
    if context.config.rollout.entropy_source == "rollout":
        yield mismatch(FIRST_WEIGHTS, metrics, context.values["logprobs"])
    trainer.run_on_all("release", lambda actor: actor.release_batch())
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


def new_weights(context: StepContext) -> Results:
    """A push after an update, and the engines' log-probs under the new weights against the trainer's."""
    sampled: ProbeRollouts = context.values["generate"]
    stages, config = context.stages, context.config
    context.gpus.to_engine()
    tokens = min(config.rollout.sampling.max_response_tokens, 4 * FEW_TOKENS)
    handle = stages.engine.generate(
        sampled.prompts, _up_to(config.rollout.sampling, tokens), samples_per_prompt=1, seed=config.seed
    )
    stages.engine.forget_prefixes()
    context.gpus.to_trainer()
    metrics = stages.trainer.score_tokens(handle)
    stages.trainer.run_on_all("release", lambda actor: actor.release_batch())
    yield mismatch("log-probs of sampler and trainer, updated weights", metrics, context.values["logprobs"])
