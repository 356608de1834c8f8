"""Run as a program: pushes weights of a model with delta nets, whose kernels on CPUs know bfloat16 only.

    python -m tests.integration.delta_probe FOLDER SAMPLER_TP [PUSHED]

Prints a line of JSON for each of: a push; a push into an engine that slept (``poisoned_sleep``), whose weights are
saved to the folder PUSHED; a push in mid-generation. Without PUSHED: what an engine says that was started from FOLDER.

A log-prob cannot be that of ``transformers`` to 1e-4. So an engine must say to the last bit what one says that was
started with the weights, and be no farther from ``transformers`` in float32 than ``transformers`` in bfloat16 is.
"""

import copy
import json
import math
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROMPT_LENGTHS = (3, 40, 63, 64, 65, 128, 129, 200)
"""About the 64 tokens that a chunk of the delta rule has."""

RESPONSE_LENGTHS = (4, 20, 6, 18, 8, 16, 10, 12)
NUM_STEPS = 8
"""Of vLLM before the push in mid-generation."""


def main(folder: Path, sampler_tp: int, pushed: Path | None) -> None:
    from gtpo_megatron.config.rollout import RolloutConfig
    from gtpo_megatron.rollout.engine_arguments import CPU_ENVIRONMENT, engine_environment
    from gtpo_megatron.weights.config_json import read_architecture

    config = RolloutConfig(kv_cache_mib=64, tensor_parallel_size=sampler_tp, max_staleness=1, partial=True)
    os.environ.update(engine_environment(config, has_gpus=False) | CPU_ENVIRONMENT)
    import torch
    from transformers import AutoModelForCausalLM

    from gtpo_megatron.rollout.cache_size import BLOCK_TOKENS
    from gtpo_megatron.rollout.vllm_engine import VllmEngine
    from tests.integration import poisoned_sleep
    from tests.integration.push_probe import EXPERT_LAYOUTS, Link, layout_of, learnt, perturb
    from tests.integration.sleep_probe import memory_sharing

    arch, generator = read_architecture(folder), torch.Generator().manual_seed(5)
    engine = VllmEngine(str(folder), config, max_sequence_tokens=256, seed=0)
    prompts = [torch.randint(3, arch.vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    before = answers(engine, prompts)
    if pushed is None:
        print(json.dumps({"answers": before}), flush=True)
        return
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.model.do_not_compile = True

    def change() -> None:
        perturb(reference, generator)
        with torch.no_grad():
            for tensor in learnt(reference):
                tensor.copy_(tensor.bfloat16())

    def link(layout: str) -> Link:
        return Link(
            engine, arch, layout_of(arch, sampler_tp, EXPERT_LAYOUTS[layout], "bfloat16"), "shared_memory", "bfloat16"
        )

    with ThreadPoolExecutor(8) as pool:
        change()
        sent, received = link("ep2").push(reference, pool, 1)
        found = distances(reference, prompts, answers(engine, prompts))
        found["gap_of_before"] = distances(reference, prompts, before)["gap"]
        cache = engine._llm.llm_engine.vllm_config.cache_config
        found["block"] = [
            cache.effective_attention_block_size,
            arch.cache_block(sampler_tp, BLOCK_TOKENS, state_width=2),
        ]
        found["keeps_prefixes"], found["state"] = cache.enable_prefix_caching, cache.mamba_ssm_cache_dtype
        print(json.dumps({"same_checksums": sent == received} | found), flush=True)

        engine._llm.collective_rpc(poisoned_sleep.install)
        sharing, wide = memory_sharing(engine), link("tp2 ep2 etp2 pp2")
        sharing.to_trainer()
        change()
        sharing.to_push()
        sent, received = wide.push(reference, pool, 2)
        sharing.to_engine()
        report = engine._llm.collective_rpc(poisoned_sleep.report)
        after = answers(engine, prompts)
        copy.deepcopy(reference).bfloat16().save_pretrained(pushed)
        for path in folder.glob("*token*"):
            shutil.copy(path, pushed)
        found = {"answers": after, "lost": [name for worker in report for name in worker["lost"]]}
        print(
            json.dumps({"same_checksums": sent == received} | found | distances(reference, prompts, after)), flush=True
        )

        print(
            json.dumps(in_mid_generation(engine, prompts, lambda: change() or wide.push(reference, pool, 3))),
            flush=True,
        )


def answers(engine, prompts):
    """Per prompt the greedy response and its log-probs; responses end one after the other."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0)
        for length in RESPONSE_LENGTHS
    ]
    outputs = engine._llm.generate([{"prompt_token_ids": row} for row in prompts], params, use_tqdm=False)
    return [
        [[token, row[token].logprob] for token, row in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]


def distances(reference, prompts, said):
    """Mean distance of these log-probs from those of transformers in float32, and that of transformers in bfloat16."""
    import torch

    def logprobs(model):
        found = []
        for prompt, response in zip(prompts, said, strict=True):
            tokens = [token for token, _ in response]
            with torch.no_grad():
                states = model.model(torch.tensor([[*prompt, *tokens]])).last_hidden_state[0, len(prompt) - 1 : -1]
                logits = states.float() @ model.lm_head.weight.float().t()
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0])
        return torch.cat(found)

    exact, rounded = logprobs(reference), logprobs(copy.deepcopy(reference).bfloat16())
    theirs = torch.tensor([logprob for response in said for _, logprob in response])
    return {
        "gap": (theirs - exact).abs().mean().item(),
        "gap_of_bfloat16": (rounded - exact).abs().mean().item(),
    }


def in_mid_generation(engine, prompts, push):
    """Whether responses go on as if what was sampled before the push were part of the prompt."""
    from gtpo_megatron.config.rollout import SamplingConfig
    from gtpo_megatron.rollout.requests import SampleRequest

    def requests(rows):
        return [SampleRequest(prompt_ids=tuple(row), group_id=group, sample=0) for group, row in enumerate(rows)]

    sampling = SamplingConfig(max_response_tokens=2 * NUM_STEPS, temperature=0.0)
    ticket = engine.begin(requests(prompts), sampling, seed=0)
    for _ in range(NUM_STEPS):
        assert not engine.advance(limit_s=0)
    push()
    engine.advance(limit_s=math.inf)
    batch = engine.take(ticket)
    going = [i for i, length in enumerate(batch.response_lengths.tolist()) if length > NUM_STEPS]
    longer = [[*prompts[i], *batch.response_ids[i, :NUM_STEPS].tolist()] for i in going]
    rest = SamplingConfig(max_response_tokens=sampling.max_response_tokens - NUM_STEPS, temperature=0.0)
    again = engine.generate(requests(longer), rest, seed=0)
    gone_on = [of_response(batch, i, NUM_STEPS) for i in going]
    return {
        "num_going": len(going),
        "versions": sorted({tuple(batch.token_versions[i, NUM_STEPS - 1 : NUM_STEPS + 1].tolist()) for i in going}),
        "same": gone_on == [of_response(again, i, 0) for i in range(len(going))],
    }


def of_response(batch, i, start):
    """Tokens from ``start`` on, and their log-probs."""
    part = slice(start, int(batch.response_lengths[i]))
    return batch.response_ids[i, part].tolist(), batch.rollout_logprobs[i, part].tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
