"""Run as a program: pushes perturbed weights from many trainer layouts into one vLLM engine and looks at what it says.

    python -m tests.integration.push_probe FOLDER SAMPLER_TP [TRANSPORT]

Trainer ranks are threads that hold real shards, cut by the load plan. After every push greedy output must equal that of
``transformers`` with the same weights. Prints a line of JSON for each push.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NUM_PROMPTS, NUM_TOKENS = 16, 32
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2 pp2, two replicas": {"tp": 2, "pp": 2, "replicas": 2}}
BUCKET_BYTES = 64 << 10


def main(folder: Path, sampler_tp: int, transport: str) -> None:
    from gtpo_megatron.rollout.environment import CPU_ENVIRONMENT, ENVIRONMENT

    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)
    if sampler_tp > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(i % os.cpu_count()) for i in range(sampler_tp))
    import torch
    from transformers import AutoModelForCausalLM

    from gtpo_megatron.config.rollout import RolloutConfig
    from gtpo_megatron.rollout.vllm_engine import VllmEngine
    from gtpo_megatron.weights.architecture import read_architecture
    from tests.unit.weights.test_push_plan import push_layout

    arch = read_architecture(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = RolloutConfig(dtype="float32", kv_cache_mib=64, tensor_parallel_size=sampler_tp)
    engine = VllmEngine(str(folder), config, max_sequence_tokens=128, seed=0)
    generator = torch.Generator().manual_seed(5)
    # the same prompts every time, longer than a block of the prefix cache: stale keys and values would show
    prompts = torch.randint(3, arch.vocab_size, (NUM_PROMPTS, 40), generator=generator)
    with ThreadPoolExecutor(8) as pool:
        for version, (name, sizes) in enumerate(LAYOUTS.items(), start=1):
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            layout = push_layout(arch, workers=sampler_tp, bucket_bytes=BUCKET_BYTES, **sizes)
            sent, received = push(engine, arch, layout, reference, pool, transport, version)
            same = greedy(engine, prompts) == expected(reference, prompts)
            print(json.dumps({"layout": name, "same_output": same, "same_checksums": sent == received}), flush=True)


def push(engine, arch, layout, reference, pool, transport, version):
    from gtpo_megatron.weights.link import SharedFolder, WeightLink, merged_checksums
    from gtpo_megatron.weights.reshard import load_plan
    from gtpo_megatron.weights.transports.process_group import Meeting, open_store
    from gtpo_megatron.weights.transports.shared_memory import SlotShape, create_slots, remove_name
    from tests.unit.weights.test_reshard import filled

    store, num_ranks, workers = None, len(layout.sources), [target.worker for target in layout.targets]
    if transport == "shared_memory":
        endpoint = {
            w: create_slots(SlotShape(slot_bytes=BUCKET_BYTES, num_ranks=num_ranks, deadline_s=60)) for w in workers
        }
    elif transport == "process_group":
        store = open_store("127.0.0.1", deadline_s=60)
        endpoint = Meeting(
            host="127.0.0.1",
            port=store.port,
            num_ranks=num_ranks,
            num_workers=len(workers),
            backend="gloo",
            deadline_s=60,
        )
    else:
        endpoint = SharedFolder(path=str(Path.cwd() / f"push_{version}"), deadline_s=60)
    link = WeightLink(arch=arch, layout=layout, dtype_name="float32", endpoint=endpoint)
    engine.connect_weights(link, workers)
    tensors = {name: t.double() for name, t in reference.state_dict().items()}
    shards = [filled(load_plan(arch, source.place, layout.padded_vocab_size), tensors) for source in layout.sources]
    senders = [link.sender(source.rank) for source in layout.sources]
    if transport == "shared_memory":
        for slots in endpoint.values():
            remove_name(slots)
    futures = [pool.submit(s.push, shard, with_checksums=True) for s, shard in zip(senders, shards, strict=True)]
    received = engine.receive_weights(version, with_checksums=True)
    return merged_checksums([future.result() for future in futures]), received


def greedy(engine, prompts):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": row} for row in prompts.tolist()]
    return [list(o.outputs[0].token_ids) for o in engine._llm.generate(requests, params, use_tqdm=False)]


def expected(reference, prompts):
    import torch

    out = reference.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, prompts.shape[1] :].tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "shared_memory")
