"""Time, memory and accuracy of `gtpo_megatron.distributed.vocab_parallel`, as ratios within one run.

    python benchmarks/vocab_parallel.py --json result.json            # P 2,048, H 896, V 151,936, float32, CPU
    python benchmarks/vocab_parallel.py --device cuda --dtype bfloat16 --tokens 8192 --hidden 5120

Every round runs all variants one after the other; a ratio is the median over rounds of the ratio within a round, so
that a machine with neighbours does not favour one of them. The yardsticks are bare matrix products of the same
shapes: logits alone forward; logits, logits again, the gradient of hidden and that of the weight for training.
Memory is the peak of the resident set (CPU) or of the allocator (CUDA) over what the inputs and gradients take,
each variant in a process of its own. TRL, Liger and cut-cross-entropy take part where they are installed
(``benchmarks/vocab_peers.py``). A backward pass has a random gradient for each log-prob.
"""

import argparse
import importlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.vocab_peers import PEERS, Peer, lacks
from gtpo_megatron.distributed.vocab_parallel import linear_token_scores, token_scores
from gtpo_megatron.kernels import tiles, torch_tiles

MIB = 1 << 20

VARIANTS = {
    "forward": ("bare_forward", "bare_forward_tiled", "fused", "fused_logprobs_only", "dense"),
    "train": ("bare_train", "fused_train", "fused_train_entropy", "dense_train", "liger_grpo_train"),
}
"""Methods of a problem, by group; the first of a group is its yardstick."""


class Problem:
    """Inputs and variants: methods without arguments, and one of each kind for each peer that can be run here."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
        self.chunk = arguments.chunk
        # Logits of standard deviation 3, as an untruncated language model has.
        scale = 3 / arguments.hidden**0.5
        self.hidden = torch.randn(arguments.tokens, arguments.hidden, device=self.device, dtype=dtype).requires_grad_()
        self.weight = torch.empty(arguments.vocab, arguments.hidden, device=self.device, dtype=dtype)
        self.weight.normal_(0, scale).requires_grad_()
        self.targets = torch.randint(0, arguments.vocab, (arguments.tokens,), device=self.device)
        self.upstream = torch.randn(arguments.tokens, device=self.device)

    def groups(self) -> dict[str, list[str]]:
        """Names of all variants by group."""
        peers = [name for name, peer in PEERS.items() if not lacks(peer, self.device)]
        methods = [name for name in VARIANTS["train"] if name != "liger_grpo_train" or "liger" in peers]
        return {"forward": [*VARIANTS["forward"], *peers], "train": [*methods, *(f"{name}_train" for name in peers)]}

    def variant(self, name: str) -> Callable[[], object]:
        """What is timed under a name."""
        peer = PEERS.get(name.removesuffix("_train"))
        if peer is None:
            variant: Callable[[], object] = getattr(self, name)
            return variant
        return partial(self.peer_train if name.endswith("_train") else self.peer_forward, peer)

    @torch.no_grad()
    def peer_forward(self, peer: Peer) -> object:
        """Its scores."""
        return peer.scores(self.hidden, self.weight, self.targets, self.chunk)

    def peer_train(self, peer: Peer) -> None:
        """Its scores and their backward pass; entropies, if it has them, detached."""
        logprobs, _ = peer.scores(self.hidden, self.weight, self.targets, self.chunk)
        self._backward((logprobs * self.upstream).sum())

    def chunks(self) -> list[slice]:
        """Tokens, a chunk at a time."""
        return list(tiles.spans(self.hidden.shape[0], self.chunk))

    @torch.no_grad()
    def bare_forward(self) -> None:
        """Logits by chunks of tokens into one buffer."""
        buffer = self.hidden.new_empty((self.chunk, self.weight.shape[0]))
        for rows in self.chunks():
            torch.mm(self.hidden[rows], self.weight.t(), out=buffer[: rows.stop - rows.start])

    @torch.no_grad()
    def bare_forward_tiled(self) -> None:
        """Logits by the tiles that the fused layer uses."""
        width = tiles.tile_columns(self.chunk, self.hidden)
        buffer = self.hidden.new_empty((self.chunk * width,))
        for rows in self.chunks():
            for columns in tiles.spans(self.weight.shape[0], width):
                size = rows.stop - rows.start
                out = buffer[: size * (columns.stop - columns.start)].view(size, -1)
                torch.mm(self.hidden[rows], self.weight[columns].t(), out=out)

    @torch.no_grad()
    def fused(self) -> object:
        """Log-prob and entropy, fused."""
        return linear_token_scores(self.hidden, self.weight, self.targets, chunk_tokens=self.chunk)

    @torch.no_grad()
    def fused_logprobs_only(self) -> Tensor:
        """The same loop without anything that only the entropy needs."""
        width = tiles.tile_columns(self.chunk, self.hidden)
        total = torch.full((self.hidden.shape[0],), -torch.inf, device=self.device)
        at_target = torch.zeros_like(total)
        buffer = torch.empty(self.chunk * width, device=self.device)
        for rows in self.chunks():
            for columns in tiles.spans(self.weight.shape[0], width):
                count = (rows.stop - rows.start) * (columns.stop - columns.start)
                logits = buffer[:count].view(rows.stop - rows.start, -1)
                left, right = self.hidden[rows], self.weight[columns].t()
                if left.dtype == logits.dtype:
                    torch.mm(left, right, out=logits)
                else:
                    torch.mm(left, right, out_dtype=logits.dtype, out=logits)
                local = self.targets[rows] - columns.start
                held = (local >= 0) & (local < logits.shape[1])
                values = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
                at_target[rows] = torch.where(held, values, at_target[rows])
                step = max(1, torch_tiles.BLOCK_ELEMENTS * torch.get_num_threads() // logits.shape[1])
                for start in range(0, logits.shape[0], step):
                    block = logits[start : start + step]
                    maximum = block.amax(1)
                    partial = block.sub_(maximum[:, None]).exp_().sum(1).log_().add_(maximum)
                    into = total[rows.start + start : rows.start + start + block.shape[0]]
                    torch.logaddexp(into, partial, out=into)
        return at_target - total

    @torch.no_grad()
    def dense(self) -> tuple[Tensor, Tensor]:
        """All logits, log_softmax, entropy."""
        log_p = torch.log_softmax((self.hidden @ self.weight.t()).float(), dim=1)
        return log_p.gather(1, self.targets[:, None]), -(log_p.exp() * log_p).sum(1)

    @torch.no_grad()
    def bare_train(self) -> None:
        """The four products of a fused layer that makes its logits twice."""
        buffer = self.hidden.new_empty((self.chunk, self.weight.shape[0]))
        grad_hidden, grad_weight = torch.empty_like(self.hidden), torch.zeros_like(self.weight)
        for rows in self.chunks():
            part, logits = self.hidden[rows], buffer[: rows.stop - rows.start]
            torch.mm(part, self.weight.t(), out=logits)
            torch.mm(part, self.weight.t(), out=logits)
            torch.mm(logits, self.weight, out=grad_hidden[rows])
            grad_weight.addmm_(logits.t(), part)

    def _backward(self, loss: Tensor) -> None:
        self.hidden.grad = self.weight.grad = None
        loss.backward()

    def fused_train(self) -> None:
        """Fused, entropy detached, forward and backward."""
        scores = linear_token_scores(self.hidden, self.weight, self.targets, chunk_tokens=self.chunk)
        self._backward((scores.logprobs * self.upstream).sum())

    def fused_train_entropy(self) -> None:
        """Fused, with the entropy's gradient."""
        scores = linear_token_scores(self.hidden, self.weight, self.targets, entropy_grad=True, chunk_tokens=self.chunk)
        self._backward(((scores.logprobs + scores.entropy) * self.upstream).sum())

    def dense_train(self) -> None:
        """All logits, log_softmax by autograd; entropy detached."""
        log_p = torch.log_softmax((self.hidden @ self.weight.t()).float(), dim=1)
        with torch.no_grad():
            (log_p.exp() * log_p).sum(1)
        self._backward((log_p.gather(1, self.targets[:, None])[:, 0] * self.upstream).sum())

    def liger_grpo_train(self) -> None:
        """Liger's fused linear GRPO loss: log-probs only, no entropy."""
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, chunk_size=1, use_ref_model=False)
        rows = max(1, self.hidden.shape[0] // self.chunk)
        shape = (rows, self.hidden.shape[0] // rows)
        mask, advantages = torch.ones(shape, device=self.device), torch.ones(rows, device=self.device)
        value = loss(self.hidden.view(*shape, -1), self.weight, self.targets.view(shape), mask, advantages)
        self._backward(value[0])


def accuracy(vocab: int) -> dict[str, dict[str, float]]:
    """Largest errors against float64, from float32 logits."""
    generator = torch.Generator().manual_seed(1)
    rows = {}
    for name in ("std 2", "std 4", "std 8", "peaked"):
        logits = torch.randn(64, vocab, generator=generator)
        if name == "peaked":
            logits[:, 7] = torch.linspace(8, 32, 64)
        else:
            logits *= float(name.split()[1])
        targets = logits.argmax(1)
        got = token_scores(logits, targets)
        log_p = torch.log_softmax(logits.double(), dim=1)
        entropy = -(log_p.exp() * log_p).sum(1)
        visible = entropy >= 1e-5
        rows[name] = {
            "entropy_error_nats": float((got.entropy - entropy).abs().max()),
            "entropy_relative_error": float((got.entropy / entropy - 1)[visible].abs().max()),
            "entropy_min": float(got.entropy.min()),
            "logprob_error_nats": float((got.logprobs - log_p.amax(1)).abs().max()),
        }
    return rows


def measure_memory(problem: Problem, name: str) -> float:
    """Peak bytes over inputs and gradients during one call, the first of its process."""
    variant = problem.variant(name)
    gradients = sum(t.numel() * t.element_size() for t in (problem.hidden, problem.weight)) if "train" in name else 0
    if problem.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        variant()
        return torch.cuda.max_memory_allocated() - before - gradients
    (problem.hidden[:64].detach() @ problem.weight[:512].detach().t()).exp().sum()  # the libraries' own buffers
    for module in ("trl.trainer.utils", "liger_kernel.chunked_loss"):
        if name.startswith(module.partition(".")[0].removesuffix("_kernel")):
            importlib.import_module(module)  # its modules are not its working memory
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    variant()
    return _status_bytes("VmHWM") - before - gradients


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_times(
    problem: Problem, rounds: int, clock: Callable[[], float], groups: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Median seconds of each variant, and its median ratio to the yardstick of its group, the group's first."""
    synchronise = torch.cuda.synchronize if problem.device.type == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name in (name for group in groups.values() for name in group):
            variant = problem.variant(name)
            synchronise()
            start = clock()
            variant()
            synchronise()
            if number:  # the first round warms up
                seconds.setdefault(name, []).append(clock() - start)
            problem.hidden.grad = problem.weight.grad = None
    rows = {}
    for group in groups.values():
        yardstick = seconds[group[0]]
        for name in group:
            mine = seconds[name]
            rows[name] = {
                "median_s": statistics.median(mine),
                "over_bare": statistics.median(a / b for a, b in zip(mine, yardstick, strict=True)),
            }
    return {**rows, "ratios": _ratios(seconds)}


def _ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    def ratio(above: str, below: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[above], seconds[below], strict=True))

    wanted = {
        "forward over bare": ("fused", "bare_forward"),
        "forward over bare in the same tiles": ("fused", "bare_forward_tiled"),
        "forward over log-probs only": ("fused", "fused_logprobs_only"),
        "training over four bare products": ("fused_train", "bare_train"),
        "training with the entropy's gradient over four bare products": ("fused_train_entropy", "bare_train"),
        "dense over fused, forward": ("dense", "fused"),
        "training over dense": ("fused_train", "dense_train"),
    }
    return {name: ratio(*pair) for name, pair in wanted.items() if seconds.keys() >= set(pair)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="P")
    parser.add_argument("--hidden", type=int, default=896, help="H")
    parser.add_argument("--vocab", type=int, default=151_936, help="V")
    parser.add_argument("--chunk", type=int, default=512, help="tokens whose logits are made together")
    parser.add_argument("--tile-elements", type=int, default=0, help="logits of a tile; 0: those of kernels/tiles.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=["forward", "train"], default=["forward", "train"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="one thread's processor seconds, for busy machines")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cpu_time:
        arguments.threads = 1
    if arguments.tile_elements:
        tiles.GPU_TILE_ELEMENTS = tiles.CPU_TILE_ELEMENTS = arguments.tile_elements
    torch.set_num_threads(arguments.threads)
    problem = Problem(arguments)
    if arguments.memory_of:
        print(measure_memory(problem, arguments.memory_of))
        return
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    groups = {name: group for name, group in problem.groups().items() if name in arguments.only}
    times = measure_times(problem, arguments.rounds, clock, groups)
    ratios = times.pop("ratios")
    names, flops = list(times), 2 * arguments.tokens * arguments.hidden * arguments.vocab
    del problem
    for name in names:
        command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        times[name]["extra_mib"] = float(done.stdout.split()[-1]) / MIB
    result = {
        "machine": platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "arguments": {key: value for key, value in vars(arguments).items() if key not in ("json", "memory_of")},
        "chunk_of_logits_mib": arguments.chunk * arguments.vocab * 4 / MIB,
        "bare_matmul_tflops": flops / times["bare_forward_tiled"]["median_s"] / 1e12,
        "variants": times,
        "ratios": ratios,
        "accuracy": accuracy(152_064),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print_table(result)


def print_table(result: dict) -> None:
    print(f"{'variant':24} {'median s':>10} {'/ bare':>8} {'extra MiB':>10}")
    for name, row in result["variants"].items():
        print(f"{name:24} {row['median_s']:10.3f} {row['over_bare']:8.3f} {row['extra_mib']:10.0f}")
    print(f"one chunk of logits: {result['chunk_of_logits_mib']:.0f} MiB")
    for name, value in result["ratios"].items():
        print(f"{name:64} {value:.3f}")
    for name, row in result["accuracy"].items():
        print(f"{name:8} " + "  ".join(f"{key} {value:.2e}" for key, value in row.items()))


if __name__ == "__main__":
    main()
