"""Other ways to compute the output layer: on a CPU they equal the present one, and the rule that chooses one."""

import json
from dataclasses import dataclass

import pytest
import torch

from benchmarks.gpu_proof import __main__ as runner
from benchmarks.gpu_proof.parts.variants import SECONDS, choice, mixed
from benchmarks.gpu_proof.variants.candidate import PASSES, Candidate, adopted
from benchmarks.gpu_proof.variants.catalogue import candidates
from benchmarks.gpu_proof.variants.measure import Layer
from benchmarks.gpu_proof.variants.streams import Streams, by_cublaslt
from benchmarks.gpu_proof.variants.turns import Turns
from gtpo_megatron.distributed import tiled_scores
from gtpo_megatron.distributed.tiled_scores import ScoreTask
from gtpo_megatron.distributed.vocab_parallel import linear_token_scores
from gtpo_megatron.kernels import partials

CPU = torch.device("cpu")

PLANS = {
    "a tile a chunk": Turns(tile_elements=1 << 20),
    "two buffers": Turns(tile_elements=1 << 14, buffers=2),
    "wide gradients": Turns(tile_elements=1 << 14, buffers=2, wide_elements=1 << 15),
    "wide gradients, one buffer": Turns(tile_elements=1, wide_elements=1 << 16, chunk_tokens=8),
    "carved out, which a CPU cannot": Turns(tile_elements=1 << 15, buffers=2, carved=8, is_reader_first=False),
}


def passed(candidate, temperature, *, entropy_grad, num_tokens=35):
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, 24, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(1300, 24) / 2)
    targets = torch.randint(0, 1291, (num_tokens,))
    with adopted(candidate):
        scores = linear_token_scores(hidden, weight, targets, None, temperature, 1291, entropy_grad, chunk_tokens=16)
    loss = scores.logprobs.sum()
    if entropy_grad:
        loss = loss + (scores.entropy * torch.linspace(-1, 1, num_tokens)).sum()
    loss.backward()
    return scores.logprobs.detach(), scores.entropy.detach(), hidden.grad, weight.grad


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.5, 2.0, 35)], ids=["1", "0.7", "a token"])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_tiles_in_turns_equal_the_present_ones(plan, temperature, entropy_grad):
    candidate = Candidate(name="turns", partials=plan.partials, gradients=plan.gradients)
    wanted = passed(Candidate(name="present"), temperature, entropy_grad=entropy_grad)
    found = passed(candidate, temperature, entropy_grad=entropy_grad)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=5e-6)


def test_no_tokens_and_a_rank_of_padding():
    plan = PLANS["wide gradients"]
    candidate = Candidate(name="turns", partials=plan.partials, gradients=plan.gradients)
    found = passed(candidate, 1.0, entropy_grad=False, num_tokens=0)
    assert [tuple(one.shape) for one in found] == [(0,), (0,), (0, 24), (1300, 24)]
    task = Shard(**task_of(torch.tensor([3, 4])), first=1400)
    padding = plan.partials(torch.randn(2, 8), torch.randn(50, 8), task, 16)
    assert torch.equal(padding, partials.empty_table(1, 2, like=torch.zeros(0, dtype=torch.float64))[0])


@dataclass(frozen=True, slots=True, eq=False)
class Shard(ScoreTask):
    """A rank's part of the vocabulary, from its row ``first`` on."""

    first: int = 0

    def first_row(self, local_rows):
        return self.first


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_partials_of_two_ranks_are_those_of_one(plan):
    torch.manual_seed(1)
    hidden, weight, targets = torch.randn(20, 16), torch.randn(1400, 16), torch.randint(0, 1391, (20,))
    whole = tiled_scores.linear_partials(hidden, weight, ScoreTask(**task_of(targets)), 16)
    shards = [
        plan.partials(hidden, weight[first : first + 700], Shard(**task_of(targets), first=first), 16)
        for first in (0, 700)
    ]
    torch.testing.assert_close(partials.merge(torch.stack(shards), 0.8), whole, rtol=1e-5, atol=1e-5)


def task_of(targets):
    return {
        "target_ids": targets,
        "inverse_temperature": 0.8,
        "vocab_size": 1391,
        "entropy_grad": False,
        "tp_group": None,
    }


def test_a_cpu_has_one_stream_and_hands_buffers_out_in_turns():
    buffers = [torch.zeros(1), torch.ones(1)]
    with by_cublaslt(CPU, is_wanted=True, carved=8), Streams(CPU, is_wanted=True, is_reader_first=True) as streams:
        found = []
        for _ in range(3):
            found.append(streams.next(buffers))
            with streams.reading():
                pass
            streams.wait(streams.mark())
    assert [float(one) for one in found] == [0.0, 1.0, 0.0]


def test_the_default_is_the_fastest_that_is_right_at_every_shape():
    present = {"32B": 0.70, "7B": 0.67}
    shares = {"present": present, "even": {"32B": 0.80, "7B": 0.78}, "uneven": {"32B": 0.90, "7B": 0.70}}
    assert choice(shares, ["32B", "7B"]) == "even"
    del shares["even"]
    assert choice(shares, ["32B", "7B"]) == "uneven"
    shares["uneven"] = {"32B": 0.90}  # it failed at the other
    assert choice(shares, ["32B", "7B"]) == "present"
    shares["slower at one"] = {"32B": 0.95, "7B": 0.67}
    assert choice(shares, ["32B", "7B"]) == "present"
    assert choice({"present": {}}, ["32B"]) == "present"


def test_the_best_scores_go_with_the_best_gradients():
    def nothing(*_, **__):
        raise AssertionError

    def others(*_, **__):
        raise AssertionError

    a, b = (Candidate(name=name, partials=one, gradients=one) for name, one in (("a", nothing), ("b", others)))
    catalogue = {kind: [Candidate(name="present"), a, b] for kind in PASSES}
    both = mixed(catalogue, {"scores": {"a": {}}, "training": {"b": {}}})
    assert (both.name, both.partials, both.gradients) == ("scores of a; gradients of b", nothing, others)
    assert mixed(catalogue, {"scores": {"a": {}}, "training": {}}).gradients is None
    for training in ("a", both.name):
        catalogue["training"].append(both)
        assert mixed(catalogue, {"scores": {"a": {}}, "training": {training: {}}}) is None
    assert mixed(catalogue, {"scores": {}, "training": {}}) is None


def test_the_catalogue_has_each_candidate_once_and_time_for_its_stage():
    for device, small in (("cpu", True), ("cpu", False), ("cuda", False)):
        found = candidates(device, small=small)
        assert list(found) == list(PASSES)
        for ways in found.values():
            names = [way.name for way in ways]
            assert names[0] == "present"
            assert len(set(names)) == len(names)
            assert all(way.partials is not None for way in ways[1:])
            assert {way.stage for way in ways} <= set(range(len(SECONDS)))


def test_a_wrong_candidate_is_seen():
    from benchmarks.gpu_proof.sizes import sizes_of

    layer = Layer(sizes_of(CPU, small=True).heads[0], CPU)
    right = layer.errors(Candidate(name="present"), "training")
    assert set(right) == {"logprobs", "entropy", "gradient of hidden", "gradient of weight"}
    assert max(right.values()) < 1e-4
    plan = PLANS["two buffers"]

    def forgets_a_tile(hidden, weight, task, chunk_tokens):
        return plan.partials(hidden, weight[:-512], task, chunk_tokens)

    wrong = Candidate(name="wrong", partials=forgets_a_tile)
    assert layer.errors(wrong, "scores")["entropy"] > 1e-2
    assert layer.beside_present(wrong, "scores")["entropy"] > 1e-2
    rates = layer.rates([wrong], "training", 1)["wrong"]
    assert 0 < rates.host <= rates.seconds
    assert rates.share > 0


@pytest.mark.slow
def test_the_part_says_which_would_be_the_default(tmp_path):
    arguments = ["--output", str(tmp_path), "--device", "cpu", "--small", "--part", "variants"]
    assert runner.main(arguments) == 0, (tmp_path / "gpu_proof.md").read_text()
    lines = json.loads((tmp_path / "variants.json").read_text())["lines"]
    verdicts = [one for one in lines if one["what"] == "would be the default" and one["group"].endswith("verdict")]
    assert len(verdicts) >= len(PASSES)
    assert (
        "| variants | scores, stage 1 of 3: verdict: would be the default |" in (tmp_path / "gpu_proof.md").read_text()
    )
