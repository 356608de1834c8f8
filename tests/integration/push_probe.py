"""Run as a program: pushes perturbed weights from many trainer layouts into one vLLM engine and looks at what it says.

    python -m tests.integration.push_probe FOLDER SAMPLER_TP TRANSPORT[,TRANSPORT ...] [NUM_MORE]

Of several transports each layout has another one.

Trainer ranks are threads that hold real shards, cut by the load plan. After every push greedy output must equal that of
``transformers`` with the same weights. Prints a line of JSON for each push. Then pushes NUM_MORE times over one link,
other weights each time, and prints what was wrong with any of them, and the memory of all processes after the first
tenth of them and after the last.
"""

import gc
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

NUM_PROMPTS, NUM_TOKENS = 16, 32
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2 pp2, two replicas": {"tp": 2, "pp": 2, "replicas": 2}}
EXPERT_LAYOUTS = {
    "ep2": {"expert": 2, "replicas": 2},
    "tp2 ep2 etp1, two replicas": {"tensor": 2, "expert": 2, "replicas": 2},
    "tp2 ep2 etp2 pp2": {"tensor": 2, "expert": 2, "expert_tensor": 2, "replicas": 2, "pipeline": (2, 1)},
}
"""Of a mixture of experts, as ``tests.unit.weights.test_reshard.world`` takes them."""
BUCKET_BYTES = 64 << 10


def main(folder: Path, sampler_tp: int, transports: list[str], num_more: int) -> None:
    from gtpo_megatron.rollout.engine_arguments import CPU_ENVIRONMENT, ENVIRONMENT

    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)
    if sampler_tp > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(i % os.cpu_count()) for i in range(sampler_tp))
    import torch
    from transformers import AutoModelForCausalLM

    from gtpo_megatron.config.rollout import RolloutConfig
    from gtpo_megatron.rollout.vllm_engine import VllmEngine
    from gtpo_megatron.weights.config_json import read_architecture

    arch = read_architecture(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.model.do_not_compile = True  # asked for by its class once vLLM has wrapped a model of that class
    config = RolloutConfig(dtype="float32", kv_cache_mib=64, tensor_parallel_size=sampler_tp)
    engine = VllmEngine(str(folder), config, max_sequence_tokens=128, seed=0)
    generator = torch.Generator().manual_seed(5)
    # the same prompts every time, longer than a block of the prefix cache: stale keys and values would show
    prompts = torch.randint(3, arch.vocab_size, (NUM_PROMPTS, 40), generator=generator)
    with ThreadPoolExecutor(8) as pool:
        layouts = LAYOUTS if arch.experts is None else EXPERT_LAYOUTS
        dealt = zip(layouts.items(), cycle(transports), strict=False)
        for version, ((name, sizes), transport) in enumerate(dealt, start=1):
            perturb(reference, generator)
            link = Link(engine, arch, layout_of(arch, sampler_tp, sizes), transport)
            sent, received = link.push(reference, pool, version)
            found = judge(engine, reference, prompts, NUM_TOKENS)
            pushed = {"layout": name, "transport": transport, "same_checksums": sent == received}
            print(json.dumps(pushed | found), flush=True)
        if num_more:
            sizes = {"tp": 2} if arch.experts is None else EXPERT_LAYOUTS["tp2 ep2 etp1, two replicas"]
            link = Link(engine, arch, layout_of(arch, sampler_tp, sizes), transports[0])
            memory, gaps, num_wrong, before = [], [], 0, [t.clone() for t in learnt(reference)]
            for index in range(num_more):
                with torch.no_grad():
                    for tensor, old in zip(learnt(reference), before, strict=True):
                        tensor.copy_(old)
                perturb(reference, generator)
                sent, received = link.push(reference, pool, len(LAYOUTS) + 1 + index)
                num_wrong += sent != received
                gaps.append(judge(engine, reference, prompts[:4], 8)["gap"])
                if index + 1 in (num_more // 10, num_more):
                    memory.append(memory_of_all())
            assert memory[0] > 0, "the kernel tells no anonymous and shared memory apart"
            sizes = {"bytes_early": memory[0], "bytes_late": memory[1]}
            print(json.dumps({"wrong_checksums": num_wrong, "largest_gap": max(gaps)} | sizes), flush=True)


def layout_of(arch, sampler_tp, sizes, dtype="float32", **fields):
    """The push's layout: dense replicas, or a world of ranks with experts."""
    from gtpo_megatron.config.model import ELEMENT_BYTES
    from gtpo_megatron.weights.push.layout import SourceRank
    from tests.unit.weights.push.test_plan import push_layout
    from tests.unit.weights.test_reshard import world

    fields |= {"itemsize": ELEMENT_BYTES[dtype], "workers": sampler_tp, "bucket_bytes": BUCKET_BYTES}
    if arch.experts is None:
        return push_layout(arch, **sizes, **fields)
    sources = tuple(SourceRank(rank=rank, coordinates=place) for rank, place in enumerate(world(**sizes)))
    return push_layout(arch, tp=sizes.get("tensor", 1), sources=sources, **fields)


def learnt(reference):
    """What a push carries of a model: parameters and expert biases."""
    biases = (buffer for name, buffer in reference.named_buffers() if name.endswith("e_score_correction_bias"))
    return [*reference.parameters(), *biases]


def perturb(reference, generator):
    import torch

    with torch.no_grad():
        for tensor in learnt(reference):
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)


def hub_tensors(reference):
    """Every tensor by its name in the tables; in memory transformers holds all experts of a layer in one."""
    from tests.distributed.mixtures import NUMBERED, by_folder_names

    found = by_folder_names(reference.state_dict(), has_numbers=reference.config.model_type in NUMBERED)
    return {name: tensor.double() for name, tensor in found.items()}


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

    def __init__(self, engine, arch, layout, transport, dtype="float32"):
        self.engine, self.layout = engine, layout
        self.link, self.store = connect(engine, arch, layout, transport, dtype)
        from gtpo_megatron.weights.push.ends import open_sender

        self.senders = [open_sender(self.link, source.rank) for source in layout.sources]
        remove_names(self.link.endpoint)

    def push(self, reference, pool, version):
        from gtpo_megatron.weights.push.sync import merge_checksums
        from gtpo_megatron.weights.reshard import load_plan
        from tests.unit.weights.test_reshard import filled

        tensors = hub_tensors(reference)
        plans = [load_plan(self.link.arch, s.coordinates, self.layout.padded_vocab_size) for s in self.layout.sources]
        shards = [filled(plan, tensors) for plan in plans]
        pushes = zip(self.senders, shards, strict=True)
        futures = [pool.submit(sender.push, shard, with_checksums=True) for sender, shard in pushes]
        received = self.engine.weights.receive(version, with_checksums=True)
        return merge_checksums([future.result() for future in futures]), received


def connect(engine, arch, layout, transport, dtype):
    """The link, and the store that a network transport meets at."""
    from gtpo_megatron.weights.push.link import Meeting, Relay, SlotShape, WeightLink
    from gtpo_megatron.weights.push.transports.process_group import open_store
    from gtpo_megatron.weights.push.transports.shared_memory import create_slots

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
    link = WeightLink(arch=arch, layout=layout, dtype_name=dtype, endpoint=endpoint)
    engine.weights.connect(link, workers)
    return link, store


def remove_names(endpoint):
    from gtpo_megatron.weights.push.link import Relay
    from gtpo_megatron.weights.push.transports.shared_memory import remove_name

    files = endpoint.slots if isinstance(endpoint, Relay) else endpoint
    for slots in files.values() if isinstance(files, dict) else ():
        remove_name(slots)


def judge(engine, reference, prompts, num_tokens):
    """Whether vLLM's greedy responses are those of transformers, and the largest gap of the log-probs of its tokens."""
    import torch
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=0)
    requests = [{"prompt_token_ids": row} for row in prompts.tolist()]
    outputs = [o.outputs[0] for o in engine._llm.generate(requests, params, use_tqdm=False)]
    responses = [list(output.token_ids) for output in outputs]
    theirs = torch.tensor(
        [[row[token].logprob for token, row in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]
    )
    sampled = torch.tensor(responses)
    with torch.no_grad():
        logits = reference(torch.cat([prompts, sampled], 1)).logits[:, prompts.shape[1] - 1 : -1]
    ours = logits.float().log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
    return {
        "same_output": responses == expected(reference, prompts, num_tokens),
        "gap": (ours - theirs).abs().max().item(),
    }


def expected(reference, prompts, num_tokens):
    import torch

    out = reference.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, prompts.shape[1] :].tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
