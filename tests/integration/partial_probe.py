"""Run as a program: pushes other weights into a vLLM engine in mid-generation and compares with ``transformers``.

    python -m tests.integration.partial_probe FOLDER SAMPLER_TP

Prints a line of JSON for each of: what was in flight, what was refused, a push that failed.
"""

import copy
import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NUM_PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS = 12, 40, 48
NUM_CONCURRENT = 8
"""Fewer than there are prompts: some requests have no token yet when the weights come."""

NUM_STEPS = 20
"""Of vLLM before the push."""

STEPS_OF_ABORTED = 8
"""Of them, before the group that is wanted most of all is aborted."""


def main(folder: Path, sampler_tp: int) -> None:
    from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
    from gtpo_megatron.rollout.engine_arguments import CPU_ENVIRONMENT, engine_environment
    from gtpo_megatron.weights.config_json import read_architecture

    config = RolloutConfig(
        dtype="float32",
        kv_cache_mib=64,
        tensor_parallel_size=sampler_tp,
        max_concurrent_sequences=NUM_CONCURRENT,
        max_staleness=1,
        partial=True,
        returns_routing=read_architecture(folder).experts is not None,
    )
    os.environ.update(engine_environment(config, has_gpus=False) | CPU_ENVIRONMENT)
    import torch
    from transformers import AutoModelForCausalLM

    from gtpo_megatron.errors import RolloutError, WeightSyncError
    from gtpo_megatron.rollout.requests import SampleRequest
    from gtpo_megatron.rollout.vllm_engine import VllmEngine
    from tests.integration.push_probe import BUCKET_BYTES, Link
    from tests.unit.weights.push.test_plan import push_layout

    arch = read_architecture(folder)
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    new = copy.deepcopy(old)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    engine = VllmEngine(str(folder), config, max_sequence_tokens=128, seed=0)
    link = Link(engine, arch, push_layout(arch, workers=sampler_tp, bucket_bytes=BUCKET_BYTES, tp=2), "shared_memory")
    prompts = torch.randint(3, arch.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    requests = [SampleRequest(prompt_ids=tuple(row), group_id=group, sample=0) for group, row in enumerate(prompts)]
    sampling = SamplingConfig(max_response_tokens=RESPONSE_TOKENS)
    half = NUM_PROMPTS // 2
    late = engine.begin(requests[half:], sampling, seed=3, priority=2)  # begun first, but wanted last
    tickets = [engine.begin(requests[:half], sampling, seed=3, priority=1), late]
    aborted = engine.begin(requests[:2], sampling, seed=9, priority=0)
    for step in range(NUM_STEPS):
        assert not engine.advance(limit_s=0)
        if step == STEPS_OF_ABORTED - 1:
            engine.abort(aborted)  # its two places go to the half that is wanted last
    with ThreadPoolExecutor(2) as pool:
        sent, received = link.push(new, pool, 1)
    try:
        engine.weights.receive(2, with_checksums=False)
    except WeightSyncError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
    assert set(engine.advance(limit_s=math.inf)) == set(tickets)
    batches = [engine.take(ticket) for ticket in tickets]
    rows = [row for batch in batches for row in compared(batch, old, new)]
    found = {name: max(row[name] for row in rows) for name in ("gap_before", "gap_after")}
    found["other_weights_gap"] = min(row["other_weights_gap"] for row in rows)
    lengths = torch.cat([batch.response_lengths for batch in batches])
    found |= {"lengths": lengths.tolist(), "budget": RESPONSE_TOKENS}
    if config.returns_routing:
        found["routed"] = torch.cat([batch.routed_lengths for batch in batches]).tolist()
        found["tokens"] = (torch.cat([batch.prompt_lengths for batch in batches]) + lengths).tolist()
    found |= {"same_checksums": sent == received, "oldest": [batch.policy_version for batch in batches]}
    print(json.dumps(found | {"switches": [row["switch"] for row in rows]}), flush=True)

    engine.begin(requests[:2], sampling, seed=4)
    assert not engine.advance(limit_s=0)
    engine._llm.collective_rpc = fail
    try:
        engine.weights.receive(2, with_checksums=False)
    except WeightSyncError as error:
        push = str(error)
    try:
        engine.advance(limit_s=0)
    except RolloutError as error:
        print(json.dumps({"push": push, "after": str(error)}), flush=True)


def compared(batch, old, new):
    """Of each response: where its weights changed, and how far its log-probs are from each model's."""
    import torch

    for i in range(batch.num_responses):
        length = int(batch.response_lengths[i])
        ids = torch.cat([batch.prompt_ids[i], batch.response_ids[i, :length]])
        gaps = []
        for model in (old, new):
            with torch.no_grad():
                logits = model(ids[None]).logits[0, PROMPT_TOKENS - 1 : -1].double()
            logprobs = logits.log_softmax(-1).gather(1, ids[PROMPT_TOKENS:, None])[:, 0]
            gaps.append((batch.rollout_logprobs[i, :length] - logprobs).abs())
        of_batch = torch.full((length,), batch.policy_version)
        versions = of_batch if batch.token_versions is None else batch.token_versions[i, :length]
        switch = int((versions == 0).sum())
        yield {
            "switch": switch,
            "gap_before": largest(gaps[0][:switch]),
            "gap_after": largest(gaps[1][switch:]),
            # with the weights of the other side of the switch
            "other_weights_gap": max(largest(gaps[1][:switch]), largest(gaps[0][switch:])),
        }


def largest(gaps):
    return float(gaps.max()) if len(gaps) else 0.0


def fail(method, *args, **kwargs):
    raise RuntimeError(f"no answer to {method}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
