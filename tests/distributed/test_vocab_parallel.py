"""Vocabulary split over real gloo ranks against dense float64: values and gradients, many cases a process group."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gtpo_megatron.distributed import input_checks as checks
from gtpo_megatron.distributed import vocab_parallel
from gtpo_megatron.errors import ConfigError, DataError, GTPOError, ShapeError
from tests.dist_utils import run_ranks
from tests.reference.vocab_scores import dense_scores

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")

# (tokens, hidden, padded vocabulary, true vocabulary, per-token temperature, gradient of entropy, chunk, first target)
CASES = [
    (7, 6, 40, 40, False, False, 3, 0),
    (13, 5, 44, 37, True, False, 1, 0),
    (5, 3, 20, 4, True, True, 5, 0),  # all targets are on the first rank; with four, three hold nothing but padding
    (1, 2, 8, 7, False, True, 64, 0),
    (6, 4, 24, 24, False, True, 4, 18),  # all targets are on the last rank
]


def _case(number, dtype=torch.float64):
    tokens, hidden, padded, true, per_token, entropy_grad, chunk, first = CASES[number]
    generator = torch.Generator().manual_seed(number)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return SimpleNamespace(
        hidden=normal(tokens, hidden),
        weight=normal(padded, hidden),
        targets=torch.randint(first, true, (tokens,), generator=generator),
        temperature=torch.rand(tokens, generator=generator) + 0.5 if per_token else 0.6,
        vocab_size=true,
        entropy_grad=entropy_grad,
        chunk=chunk,
        upstream=normal(tokens),
        upstream_entropy=normal(tokens),
    )


def _loss(scores, case):
    entropy_term = scores.entropy.double() @ case.upstream_entropy.double() if case.entropy_grad else 0.0
    return scores.logprobs.double() @ case.upstream.double() + entropy_term


def _dense(case):
    hidden, weight = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    logits = hidden @ weight.T
    logits.retain_grad()
    scores = dense_scores(logits, case.targets, case.temperature, case.vocab_size)
    _loss(scores, case).backward()
    return scores, hidden.grad, weight.grad, logits.grad


def _score_all(rank, world_size, dtype, kept_bytes):
    vocab_parallel.KEPT_BYTES = kept_bytes
    results = []
    for number in range(len(CASES)):
        case = _case(number, dtype)
        rows = case.weight.shape[0] // world_size
        mine = slice(rank * rows, (rank + 1) * rows)
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight[mine].clone().requires_grad_()
        options = (dist.group.WORLD, case.temperature, case.vocab_size, case.entropy_grad)
        fused = vocab_parallel.linear_token_scores(hidden, weight, case.targets, *options, case.chunk)
        _loss(fused, case).backward()
        logits = (case.hidden @ case.weight[mine].T).requires_grad_()
        plain = vocab_parallel.token_scores(logits, case.targets, *options)
        _loss(plain, case).backward()
        outputs = [[s.logprobs, s.entropy] for s in (fused, plain)]
        results.append(
            ([[t.detach() for t in scores] for scores in outputs], [hidden.grad, weight.grad, logits.grad], mine)
        )
    return results


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kept_bytes", [0, vocab_parallel.KEPT_BYTES], ids=["made_again", "kept"])
def test_split_vocabulary_equals_dense(tp_size, dtype, kept_bytes):
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 5e-6}
    ranks = run_ranks(_score_all, tp_size, dtype, kept_bytes)
    for number in range(len(CASES)):
        expected, grad_hidden, grad_weight, grad_logits = _dense(_case(number, dtype))
        for rank in ranks:
            outputs, (hidden, weight, logits), mine = rank[number]
            for scores in outputs:
                for got, want in zip(scores, expected, strict=True):
                    torch.testing.assert_close(got.double(), want.detach(), **tolerance)
            torch.testing.assert_close(hidden.double(), grad_hidden, **tolerance)
            torch.testing.assert_close(weight.double(), grad_weight[mine], **tolerance)
            torch.testing.assert_close(logits.double(), grad_logits[:, mine], **tolerance)


def _sequence_parallel(rank, world_size):
    """Each rank's own part of hidden's gradient, and what a reduce-scatter makes of it."""
    case = _case(0)
    rows = case.weight.shape[0] // world_size
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight[rank * rows : (rank + 1) * rows]
    scores = vocab_parallel.linear_token_scores(
        hidden, weight, case.targets, dist.group.WORLD, case.temperature, reduce_hidden_grad=False
    )
    _loss(scores, case).backward()
    return hidden.grad


def test_unreduced_hidden_gradients_sum_to_the_dense_one():
    parts = run_ranks(_sequence_parallel, 2)
    _, grad_hidden, _, _ = _dense(_case(0))
    torch.testing.assert_close(parts[0] + parts[1], grad_hidden)
    assert not torch.allclose(parts[0], parts[1])


def _nearly_certain(rank, world_size):
    weight = torch.linspace(-1, 1, 5000)[:, None]
    weight[4321] = 24.0  # on the last rank; the others hold the rest of a very small entropy
    rows = 5000 // world_size
    mine = weight[rank * rows : (rank + 1) * rows]
    return vocab_parallel.linear_token_scores(torch.ones(1, 1), mine, torch.tensor([4321]), dist.group.WORLD).entropy


def test_small_entropies_keep_their_digits_across_ranks():
    weight = torch.linspace(-1, 1, 5000)[None]
    weight[0, 4321] = 24.0
    want = dense_scores(weight, torch.tensor([4321])).entropy
    assert want < 1e-5
    for entropy in run_ranks(_nearly_certain, 2):
        torch.testing.assert_close(entropy.double(), want, rtol=1e-5, atol=0)


def _not_a_member(rank, world_size):
    only_first = dist.new_group([0])
    if rank == 0:
        return None
    try:
        vocab_parallel.token_scores(torch.zeros(1, 2), torch.tensor([0]), only_first)
    except ConfigError as error:
        return str(error)


def test_a_group_without_this_rank_is_refused():
    assert "not in it" in run_ranks(_not_a_member, 2)[1]


def _no_tokens(rank, world_size):
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    scores = vocab_parallel.linear_token_scores(hidden, weight, torch.zeros(0, dtype=torch.int64), dist.group.WORLD)
    (scores.logprobs.sum() * 0.0).backward()
    return scores.logprobs.shape, scores.entropy.shape, hidden.grad.shape, weight.grad.abs().max()


def test_no_tokens_still_runs_backward_on_every_rank():
    for logprobs, entropy, hidden_grad, weight_grad in run_ranks(_no_tokens, 2):
        assert (logprobs, entropy, hidden_grad, weight_grad) == ((0,), (0,), (0, 4), 0)


def _count_collectives(rank, world_size):
    """Names of the collectives of a forward and of a backward pass."""
    seen = []

    def counted(name, original):
        def call(*args, **kwargs):
            seen.append(name)
            return original(*args, **kwargs)

        return call

    for name in ("all_gather_single", "all_reduce", "all_gather", "broadcast", "reduce", "all_gather_object"):
        setattr(dist, name, counted(name, getattr(dist, name)))
    case = _case(0)
    rows = case.weight.shape[0] // world_size
    mine = case.weight[rank * rows : (rank + 1) * rows]
    counts = []
    for reduce_hidden_grad in (True, False):
        hidden = case.hidden.clone().requires_grad_()
        scores = vocab_parallel.linear_token_scores(
            hidden, mine, case.targets, dist.group.WORLD, chunk_tokens=4, reduce_hidden_grad=reduce_hidden_grad
        )
        forward = list(seen)
        scores.logprobs.sum().backward()
        counts.append((forward, seen[len(forward) :]))
        seen.clear()
    return counts


def test_two_collectives_forward_and_one_all_reduce_a_chunk_backward():
    for reduced, unreduced in run_ranks(_count_collectives, 2):
        assert reduced == (["all_gather_single"] * 2, ["all_reduce"] * 2)
        assert unreduced == (["all_gather_single"] * 2, [])


def _tell(story, wrong):
    if wrong:
        raise DataError(story)
    return {}


def _bad_inputs(rank, world_size):
    """One rank is wrong; the error every rank sees."""
    hidden, weight, targets = torch.randn(4, 3), torch.randn(6, 3), torch.tensor([0, 5, 11, 7])
    wrong = rank == 1
    calls = {
        "target": lambda: vocab_parallel.linear_token_scores(
            hidden, weight, targets + 7 * wrong, dist.group.WORLD, vocab_size=12
        ),
        "rows": lambda: vocab_parallel.linear_token_scores(hidden, weight[: 6 - wrong], targets * 0, dist.group.WORLD),
        "split": lambda: vocab_parallel.linear_token_scores(
            hidden, weight[: 6 - wrong], targets * 0, dist.group.WORLD, vocab_size=11
        ),
        "tokens": lambda: vocab_parallel.token_scores(
            torch.randn(4 - wrong, 6), targets[: 4 - wrong] * 0, dist.group.WORLD
        ),
        "temperature": lambda: vocab_parallel.token_scores(
            torch.randn(4, 6), targets, dist.group.WORLD, 1.0 - 2.0 * wrong
        ),
        "other targets": lambda: vocab_parallel.token_scores(
            torch.randn(4, 6), targets.roll(1) if not wrong else targets * 0, dist.group.WORLD
        ),
        "no temperature": lambda: vocab_parallel.token_scores(
            torch.randn(4, 6), targets, dist.group.WORLD, None if wrong else 1.0
        ),
        "no targets": lambda: vocab_parallel.linear_token_scores(
            hidden, weight, None if wrong else targets, dist.group.WORLD
        ),
        "long story": lambda: checks.agree(partial(_tell, '\U0001f987\t"' * 2000, wrong), dist.group.WORLD, CPU),
        "no JSON": lambda: checks.agree(lambda: {"fact": object() if wrong else 0}, dist.group.WORLD, CPU),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except GTPOError as error:
            errors[name] = (type(error), str(error))
    return errors


def test_bad_input_on_one_rank_raises_the_same_error_on_all():
    first, second = run_ranks(_bad_inputs, 2)
    assert first == second
    kinds = {name: kind for name, (kind, _) in first.items()}
    assert kinds == {
        "target": DataError,
        "rows": ShapeError,
        "split": ShapeError,
        "tokens": ShapeError,
        "temperature": DataError,
        "other targets": ShapeError,
        "no temperature": DataError,
        "no targets": DataError,
        "long story": DataError,
        "no JSON": DataError,
    }
    assert first["no temperature"][1].startswith("tensor-parallel rank 1: TypeError: '>' not supported")
    assert "AttributeError: 'NoneType'" in first["no targets"][1]
    told = first["long story"][1].removeprefix("tensor-parallel rank 1: ")
    assert len(told) > 200
    assert ('\U0001f987\t"' * 2000).startswith(told)
    assert "rank 1" in first["target"][1]
    assert "18" in first["target"][1]
