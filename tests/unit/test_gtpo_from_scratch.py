"""``examples/gtpo_from_scratch.py`` computes what the package does; tests/integration/test_examples.py runs it."""

import ast
import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo_megatron.algorithms import assign_credit, prepare_update, update_loss
from gtpo_megatron.algorithms.checks import flatten
from gtpo_megatron.algorithms.credit.gtpo import gtpo_credit
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.config.algorithm import GTPOConfig
from tests.reference import credit as reference
from tests.strategies import Batch, batches, examples, random_batch
from tests.unit.algorithms.parts import table_of

FILE = Path(__file__).parents[2] / "examples" / "gtpo_from_scratch.py"
FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}
FLOAT32 = {"rtol": 2.0**-23, "atol": 1e-8}
"""Of the package's results, which are float32: one step."""
SIGNIFICANT = {"rtol": 1e-8, "atol": 1e-8}
"""Of the package's float64, whose entropies have 32 significant bits; weights are up to the number of responses."""
CASES = [
    random_batch(seed, num_groups=groups, group_size=size, max_tokens=tokens)
    for seed, (groups, size, tokens) in enumerate([(4, 8, 12), (1, 2, 3), (2, 5, 1), (6, 16, 30), (3, 1, 4)])
]


@pytest.fixture(scope="module")
def scratch():
    specification = importlib.util.spec_from_file_location("gtpo_from_scratch", FILE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def credit_of(scratch, batch: Batch):
    given = batch.arguments(extra=2, padding=math.nan)
    return scratch.gtpo_credit(
        given["rewards"].double(), given["token_entropy"], given["response_mask"], given["group_ids"]
    )


def check_credit(scratch, batch: Batch) -> None:
    """Against the scalar loops, the package's float64, and its results."""
    mine = credit_of(scratch, batch)
    loops = reference.gtpo(batch.entropies, batch.rewards, batch.groups, reference.Rules())
    for ours, rows in zip(mine, loops, strict=True):
        torch.testing.assert_close(ours, batch.matrix(rows, extra=2), **FLOAT64)

    arguments = batch.arguments(extra=2)
    table = table_of(batch.rewards, batch.groups, batch.lengths.tolist())
    mask = arguments["response_mask"]
    entropy = flatten(mask, arguments["token_entropy"]).double()
    exact_credit = gtpo_credit(GTPOConfig(), CreditBatch.of(mask, table, entropy=entropy))
    credit = assign_credit(GTPOConfig(), **arguments)
    theirs = ((exact_credit.shaped_rewards, credit.shaped_rewards), (exact_credit.advantages, credit.advantages))
    for ours, (exact, result) in zip(mine, theirs, strict=True):
        torch.testing.assert_close(flatten(mask, ours), exact, **SIGNIFICANT)
        torch.testing.assert_close(ours.float(), result, **FLOAT32)


@pytest.mark.parametrize("batch", CASES, ids=range(len(CASES)))
def test_its_credit_is_that_of_the_package(scratch, batch):
    """Groups all right and all wrong, responses without tokens, positions that one response reaches, entropies of 0."""
    check_credit(scratch, batch)


@examples(60)
@given(batch=batches())
def test_its_credit_is_that_of_the_package_on_any_batch(scratch, batch):
    check_credit(scratch, batch)


def test_its_credit_is_that_of_the_readme(scratch):
    entropies = [[0.1, 2.0], [0.3, 0.5], [0.2, 1.5], [0.2, 0.1]]
    _, advantages = credit_of(scratch, Batch(entropies, [1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0]))
    shown = [[0.9068, 1.1063], [1.0882, 0.8887], [-0.9969, -0.8383], [-0.9969, -1.1554]]
    torch.testing.assert_close(advantages[:, :2], torch.tensor(shown, dtype=torch.float64), rtol=0, atol=5e-5)


@examples(30)
@given(batch=batches(), seed=st.integers(0, 1000), spread=st.sampled_from([0.0, 0.1, 0.5]))
def test_its_loss_and_gradient_are_those_of_the_package(scratch, batch, seed, spread):
    if not any(batch.entropies):
        return  # a mean over no tokens
    arguments = batch.arguments(extra=2)
    del arguments["rewards"]
    mask = arguments["response_mask"]
    _, advantages = credit_of(scratch, batch)
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(mask.shape, generator=generator, dtype=torch.float64) - 2
    new = old + spread * torch.randn(mask.shape, generator=generator, dtype=torch.float64)  # 0.5: many are clipped
    old, new = old.masked_fill(~mask, math.nan), new.masked_fill(~mask, math.nan)

    mine, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    loss = scratch.gtpo_loss(mine, old, advantages, mask)
    loss.backward()
    config = GTPOConfig()
    update = prepare_update(config, advantages=advantages, old_logprobs=old, **arguments)
    whole = update_loss(config, theirs, update).loss_sum / update.denominator
    whole.backward()
    torch.testing.assert_close(loss, whole, **FLOAT64)
    torch.testing.assert_close(mine.grad, theirs.grad, **FLOAT64)


def test_its_settings_are_those_of_the_package(scratch):
    config = GTPOConfig()
    assert (config.alpha1, config.alpha2, config.entropy_floor) == (scratch.ALPHA1, scratch.ALPHA2, scratch.FLOOR)
    assert (config.clip_eps_low, config.clip_eps_high) == (scratch.EPS_LOW, scratch.EPS_HIGH)


@pytest.fixture(scope="module")
def sampled(scratch):
    """The tiny model, its tokenizer, and six responses to three prompts of unequal length, some of them cut."""
    folder = scratch.ASSETS / "tiny_qwen2"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    asked = [("Compute 14+6+8. Put the answer in \\boxed{}.", "28"), ("2+2", "4"), ("Compute 17-20.", "-3")]
    problems = [{"prompt": [{"role": "user", "content": text}], "answer": answer} for text, answer in asked]
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "MAX_TOKENS", 40)
        return model, tokenizer, scratch.sample(model, tokenizer, problems, 2)


def test_a_response_ends_with_its_end_of_turn(scratch, sampled):
    _, tokenizer, rollout = sampled
    assert rollout.group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    lengths = rollout.mask.sum(1)
    assert len(set(lengths.tolist())) > 1, "choose another seed"
    width = rollout.mask.shape[1]
    for ids, mask, length in zip(rollout.input_ids[:, -width:], rollout.mask, lengths.tolist(), strict=True):
        assert mask.tolist() == [True] * length + [False] * (width - length)
        ends = (ids[mask] == tokenizer.eos_token_id).tolist()
        assert not any(ends[:-1])
        assert ends[-1] or length == width


def test_padding_changes_no_score(scratch, sampled):
    """Each response alone, without padding, its log-probs and entropies made in another way."""
    model, _, rollout = sampled
    with torch.no_grad():
        logp, entropy = scratch.score(model, rollout)
        for row, mask in enumerate(rollout.mask):
            ids = rollout.input_ids[row][rollout.attention[row].bool()]
            length = int(mask.sum())
            logits = model(input_ids=ids[None]).logits[0, -length - 1 : -1].double()
            policy = torch.distributions.Categorical(logits=logits)
            close = {"rtol": 1e-4, "atol": 1e-5}  # the model's float32
            torch.testing.assert_close(logp[row, :length], policy.log_prob(ids[-length:]), **close)
            torch.testing.assert_close(entropy[row, :length], policy.entropy(), **close)


def test_only_the_log_probs_have_a_gradient(scratch, sampled):
    model, _, rollout = sampled
    logp, entropy = scratch.score(model, rollout)
    assert logp.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("14+6=20, 20+8=28 \\boxed{28}", 1.0),
        ("\\boxed{27} no, \\boxed{28}", 1.0),
        ("\\boxed{28} no, \\boxed{27}", 0.0),
        ("28", 0.0),
        ("\\boxed{28", 0.0),
    ],
)
def test_the_last_boxed_number_is_the_answer(scratch, response, right):
    assert scratch.outcome(response, "28") == right


def test_it_needs_nothing_of_the_package_and_stays_short():
    text = FILE.read_text(encoding="utf-8")
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    assert {name.partition(".")[0] for name in modules} & {"gtpo_megatron", "recipes"} == {"recipes"}
    assert len(text.splitlines()) <= 165
    assert re.findall(r"# Eq\. (\d)", text) == ["3", "4", "5", "6", "7"]
