"""Run as a program: pushes perturbed weights from many trainer layouts into one vLLM engine and looks at what it says.

    python -m tests.integration.push_probe FOLDER SAMPLER_TP TRANSPORT [NUM_MORE]

Trainer ranks are threads that hold real shards, cut by the load plan. After every push greedy output must equal that of
``transformers`` with the same weights. Prints a line of JSON for each push. Then pushes NUM_MORE times over one link
and prints the memory of all processes after the first tenth of them and after the last.
"""

import gc
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NUM_PROMPTS, NUM_TOKENS = 16, 32
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2 pp2, two replicas": {"tp": 2, "pp": 2, "replicas": 2}}
BUCKET_BYTES = 64 << 10


def main(folder: Path, sampler_tp: int, transport: str, num_more: int) -> None:
    from gtpo_megatron.rollout.environment import CPU_ENVIRONMENT, ENVIRONMENT

    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)
    if sampler_tp > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(i % os.cpu_count()) for i in range(sampler_tp))
    import torch
    from transformers import AutoModelForCausalLM

    from gtpo_megatron.config.rollout import RolloutConfig
    from gtpo_megatron.rollout.vllm_engine import VllmEngine
    from gtpo_megatron.weights.architecture import read_architecture
    from tests.unit.weights.push.test_plan import push_layout

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
            sent, received = Link(engine, arch, layout, transport).push(reference, pool, version)
            same = greedy(engine, prompts) == expected(reference, prompts)
            print(json.dumps({"layout": name, "same_output": same, "same_checksums": sent == received}), flush=True)
        if num_more:
            layout = push_layout(arch, workers=sampler_tp, bucket_bytes=BUCKET_BYTES, tp=2)
            link, memory = Link(engine, arch, layout, transport), []
            for index in range(num_more):
                link.push(reference, pool, len(LAYOUTS) + 1 + index)
                if index + 1 in (num_more // 10, num_more):
                    memory.append(memory_of_all())
            assert memory[0] > 0, "the kernel tells no anonymous and shared memory apart"
            print(json.dumps({"bytes_early": memory[0], "bytes_late": memory[1]}), flush=True)


def memory_of_all():
    """Of this process and its children: its own pages and shared memory, which pushes could leak, counted once.

    Not the libraries: another program on this machine that maps the same files takes its part of their pages, and gives
    it back when it ends.
    """
    import psutil

    gc.collect()
    here = psutil.Process()
    pids = (here.pid, *(child.pid for child in here.children(recursive=True)))
    lines = [line.split() for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line[1]) << 10 for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:"))


class Link:
    """Both sides of pushes from one layout."""

    def __init__(self, engine, arch, layout, transport):
        self.engine, self.layout = engine, layout
        self.link, self.store = connect(engine, arch, layout, transport)
        self.senders = [self.link.sender(source.rank) for source in layout.sources]
        remove_names(self.link.endpoint)

    def push(self, reference, pool, version):
        from gtpo_megatron.weights.push.link import merged_checksums
        from gtpo_megatron.weights.reshard import load_plan
        from tests.unit.weights.test_reshard import filled

        tensors = {name: t.double() for name, t in reference.state_dict().items()}
        plans = [load_plan(self.link.arch, s.place, self.layout.padded_vocab_size) for s in self.layout.sources]
        shards = [filled(plan, tensors) for plan in plans]
        pushes = zip(self.senders, shards, strict=True)
        futures = [pool.submit(sender.push, shard, with_checksums=True) for sender, shard in pushes]
        received = self.engine.receive_weights(version, with_checksums=True)
        return merged_checksums([future.result() for future in futures]), received


def connect(engine, arch, layout, transport):
    """The link, and the store that a network transport meets at."""
    from gtpo_megatron.weights.push.link import Relay, WeightLink
    from gtpo_megatron.weights.push.transports.process_group import Meeting, open_store
    from gtpo_megatron.weights.push.transports.shared_memory import SlotShape, create_slots

    store, num_ranks, workers = None, len(layout.sources), [target.worker for target in layout.targets]
    if transport in ("shared_memory", "relay"):
        writers = num_ranks if transport == "shared_memory" else 1
        shape = SlotShape(slot_bytes=BUCKET_BYTES, num_ranks=writers, deadline_s=60)
        slots = endpoint = {worker: create_slots(shape) for worker in workers}
    if transport in ("process_group", "relay"):
        store = open_store("127.0.0.1", deadline_s=60)
        members = len(workers) if transport == "process_group" else 0
        meeting = endpoint = Meeting(
            host="127.0.0.1",
            port=store.port,
            num_ranks=num_ranks,
            num_workers=members,
            backend="gloo",
            deadline_s=60,
        )
    if transport == "relay":
        endpoint = Relay(meeting=meeting, slots=slots)
    link = WeightLink(arch=arch, layout=layout, dtype_name="float32", endpoint=endpoint)
    engine.connect_weights(link, workers)
    return link, store


def remove_names(endpoint):
    from gtpo_megatron.weights.push.link import Relay
    from gtpo_megatron.weights.push.transports.shared_memory import remove_name

    files = endpoint.slots if isinstance(endpoint, Relay) else endpoint
    for slots in files.values() if isinstance(files, dict) else ():
        remove_name(slots)


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
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else 0)
