"""The algorithm that docs/your_own_algorithm.md writes, as a file outside the package."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit, policy_loss
from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.config.algorithm.base import SoftOverlongPenalty
from gtpo_megatron.errors import ConfigError
from tests.strategies import Batch

DOCUMENT = Path(__file__).parents[2] / "docs" / "your_own_algorithm.md"


def own_module(folder: Path, name: str = "mine", number: int = 0) -> Path:
    """Writes an example of the document as a module."""
    code = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    path = folder / f"{name}.py"
    path.write_text(code[number], encoding="utf-8")
    return path


@pytest.fixture
def mine(tmp_path, monkeypatch):
    own_module(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("mine")
    sys.modules.pop("mine", None)


@pytest.fixture
def bounded(tmp_path, monkeypatch):
    own_module(tmp_path, "bounded", 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("bounded")
    sys.modules.pop("bounded", None)


def left_out(rewards: list[float], groups: list[int]) -> list[float]:
    """``r_i`` less the mean of the others of its group."""
    result = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
        result.append(reward - sum(others) / len(others) if others else 0.0)
    return result


def test_it_is_rloo(mine) -> None:
    batch = Batch([[1.0, 2.0], [0.5], [1.0], [3.0, 1.0, 1.0], [1.0], []], [1, 0, 0, 0.25, 1, 1], [7, 7, 7, 3, 3, 3])
    arguments = batch.arguments()
    credit = assign_credit(mine.RLOOConfig(), **arguments)
    wanted = left_out(batch.rewards[:5], batch.groups[:5])  # the last one has no tokens
    assert credit.advantages[:5, 0].tolist() == pytest.approx(wanted)
    assert bool(
        (
            credit.advantages[arguments["response_mask"]]
            == credit.advantages[:, :1].expand(-1, 3)[arguments["response_mask"]]
        ).all()
    )
    plain = assign_credit(mine.RLOOConfig(baseline="group-mean"), **arguments)
    assert plain.advantages[:3, 0].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])

    logprobs = torch.full((6, 3), -0.5, requires_grad=True)
    terms = policy_loss(
        mine.RLOOConfig(),
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        advantages=credit.advantages,
        response_mask=arguments["response_mask"],
    )
    (terms.loss_sum / terms.weight).backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -credit.advantages / 5)  # tokens are added, five responses averaged


def test_a_class_without_a_record_of_its_own_is_refused(mine) -> None:
    class Derived(GTPOConfig):
        pass

    for config in (Derived(), type("Other", (mine.RLOOConfig,), {})()):
        with pytest.raises(ConfigError, match="0 records of it in its module, expected one"):
            algorithm_of(config)
    with pytest.raises(ConfigError, match="got str"):
        algorithm_of("rloo")


@pytest.mark.parametrize("options", [{}, {"formulation": "v2"}, {"advantage_scope": "group", "entropy_axis": "matrix"}])
def test_the_variant_of_gtpo_is_gtpo_until_a_weight_reaches_its_bound(bounded, options) -> None:
    rows = [[1.0, 2.0], [0.5, 7.0, 1.0], [1.0], [3.0, 1.0, 1.0], [0.2], [0.1, 4.0]]
    arguments = Batch(rows, [1, 1, 0, 0, 1, 0], [7, 7, 7, 3, 3, 3]).arguments()
    penalty = SoftOverlongPenalty(max_tokens=3, buffer_tokens=2)
    gtpo = assign_credit(GTPOConfig(length_penalty=penalty, **options), **arguments)
    unbounded = assign_credit(
        bounded.BoundedConfig(length_penalty=penalty, largest_weight=100.0, **options), **arguments
    )
    assert torch.equal(unbounded.shaped_rewards, gtpo.shaped_rewards)
    assert torch.equal(unbounded.advantages, gtpo.advantages)

    capped = assign_credit(bounded.BoundedConfig(length_penalty=penalty, largest_weight=1.2, **options), **arguments)
    assert not torch.equal(capped.advantages, gtpo.advantages)
    if not options:  # entropies 2 and 7 of the two correct tokens at t = 1, and a penalty of -1 on three tokens
        assert gtpo.shaped_rewards[1, 1].item() == pytest.approx(0.1 * 14 / 9)
        assert capped.shaped_rewards[1, 1].item() == pytest.approx(0.1 * 1.2)
