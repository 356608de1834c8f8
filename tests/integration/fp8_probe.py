"""Run as a program: pushes bfloat16 weights into an engine whose linear layers are FP8.

    python -m tests.integration.fp8_probe FOLDER SAMPLER_TP [PUSHED]

Prints a line of JSON for each push, from three layouts; the last weights are saved to the folder PUSHED. Without
PUSHED: what an engine says that was started from FOLDER.

``RoundedLinear`` is the formula: E4M3 of activations, with a scale a token, times E4M3 of weights, with a scale a row.
"""

import copy
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

LARGEST = 448.0
"""Of E4M3."""

LEAST_SCALE = 1.0 / (LARGEST * 512)
"""Of vLLM's scales, so that zeros have one."""


class RoundedLinear(torch.nn.Linear):
    """A linear layer as vLLM's FP8 has it, computed in float32."""

    def forward(self, values):
        rounded = rounded_rows(values.float()) @ rounded_rows(self.weight.float()).t()
        return (rounded if self.bias is None else rounded + self.bias.float()).to(values.dtype)


def rounded_rows(matrix):
    """The nearest values that E4M3 has, with a scale for each row."""
    scale = (matrix.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(LEAST_SCALE)
    return (matrix / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def main(folder: Path, sampler_tp: int, pushed: Path | None) -> None:
    from gtpo_megatron.config.rollout import RolloutConfig
    from gtpo_megatron.rollout.engine_arguments import CPU_ENVIRONMENT, engine_environment
    from gtpo_megatron.weights.config_json import read_architecture

    config = RolloutConfig(dtype="fp8", kv_cache_mib=64, tensor_parallel_size=sampler_tp)
    os.environ.update(engine_environment(config, has_gpus=False) | CPU_ENVIRONMENT)
    from transformers import AutoModelForCausalLM

    from gtpo_megatron.companions.planner.engine import engine_memory
    from gtpo_megatron.companions.planner.known_models import find_shape
    from gtpo_megatron.rollout.vllm_engine import VllmEngine
    from tests.integration.delta_probe import PROMPT_LENGTHS, answers
    from tests.integration.push_probe import LAYOUTS, Link, layout_of, learnt, perturb

    arch, generator = read_architecture(folder), torch.Generator().manual_seed(5)
    engine = VllmEngine(str(folder), config, max_sequence_tokens=256, seed=0)
    prompts = [torch.randint(3, arch.vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    if pushed is None:
        print(json.dumps({"answers": answers(engine, prompts)}), flush=True)
        return
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.model.do_not_compile = True
    with ThreadPoolExecutor(8) as pool:
        for version, (name, sizes) in enumerate(LAYOUTS.items(), start=1):
            perturb(reference, generator)
            with torch.no_grad():
                for tensor in learnt(reference):
                    tensor.copy_(tensor.bfloat16())
            layout = layout_of(arch, sampler_tp, sizes, "bfloat16", in_step=True)
            sent, received = Link(engine, arch, layout, "shared_memory", "bfloat16").push(reference, pool, version)
            said = answers(engine, prompts)
            found = {"layout": name, "same_checksums": sent == received, "answers": said}
            found["differing"] = differing_weights(engine, reference)
            print(json.dumps(found | distances(reference, prompts, said)), flush=True)
    held = max(engine._llm.collective_rpc(weight_bytes))
    planned = engine_memory(
        find_shape(str(folder)),
        tensor=sampler_tp,
        weight_bytes=2,
        layer_bytes=1,
        max_sequences=config.max_concurrent_sequences,
        sequence_tokens=256,
    )
    print(json.dumps({"held": held, "planned": planned.weights}), flush=True)
    copy.deepcopy(reference).bfloat16().save_pretrained(pushed)
    for path in folder.glob("*token*"):
        shutil.copy(path, pushed)


def weight_bytes(worker):
    """Of a worker's parameters but scales, of which models as small as these have many; each tensor once."""
    parameters = worker.model_runner.model.named_parameters()
    return sum(parameter.nbytes for name, parameter in parameters if not name.endswith("_scale"))


def weights_of(worker):
    """The products' weights that this worker has, by name."""
    return {
        name: (layer.weight.float() * layer.weight_scale.flatten()).t()
        for name, layer in worker.model_runner.model.named_modules()
        if hasattr(layer, "weight_scale")
    }


def differing_weights(engine, reference):
    """Names of the engine's matrices that are not, to the last bit, its workers' parts of the rounded ones."""
    workers = engine._llm.collective_rpc(weights_of)
    assert len(workers[0]) == 4 * len(reference.model.layers), workers[0].keys()
    ours = {name: rounded_rows(tensor) for name, tensor in reference.state_dict().items() if tensor.ndim == 2}
    config, differing = reference.config, []
    heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    for name in workers[0]:
        before, _, last = name.rpartition(".")
        if f"{name}.weight" in ours:  # the folder has several matrices in one, as vLLM has
            whole = ours[f"{name}.weight"]
            sizes = {"qkv_proj": heads, "gate_up_proj": [1, 1]}.get(last, [1])
            matrices = whole.split([whole.shape[0] * size // sum(sizes) for size in sizes])
        else:
            parts = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}[last]
            matrices = [ours[f"{before}.{part}_proj.weight"] for part in parts]
        axis = 1 if last in ("o_proj", "down_proj") else 0
        for rank, held in enumerate(workers):
            cut = [matrix.chunk(len(workers), axis)[rank] for matrix in matrices]
            if not torch.equal(held[name], torch.cat(cut)):
                differing.append(name)
    return differing


def distances(reference, prompts, said):
    """Mean distances of these log-probs from those of the rounded model and of the whole one, both in bfloat16."""
    whole = copy.deepcopy(reference).bfloat16()
    rounded = copy.deepcopy(whole)
    for layer in rounded.model.modules():
        if type(layer) is torch.nn.Linear:
            layer.__class__ = RoundedLinear

    def logprobs(model):
        found = []
        for prompt, response in zip(prompts, said, strict=True):
            tokens = torch.tensor([token for token, _ in response])
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            found.append(logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0])
        return torch.cat(found)

    theirs = torch.tensor([logprob for response in said for _, logprob in response])
    gaps = {"to_rounded": theirs - logprobs(rounded), "to_whole": theirs - logprobs(whole)}
    return {name: gap.abs().mean().item() for name, gap in gaps.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
