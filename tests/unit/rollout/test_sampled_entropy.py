"""Entropies inside vLLM's second model runner, whose interface names requests by slots: driven by hand on a CPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.rollout.engine_arguments import GPU_ENTROPY_PROCESSOR, engine_environment
from gtpo_megatron.rollout.entropy_log import EntropyLog
from gtpo_megatron.rollout.requests import REQUEST_KEY

pytestmark = pytest.mark.vllm

NUM_SLOTS, VOCAB = 6, 11


class Runner:
    """Slots, rows and lengths as vLLM's runner keeps them; no prompt is longer than five tokens."""

    def __init__(self):
        from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors

        self.prompts = np.zeros(NUM_SLOTS, dtype=np.int32)
        self.prefills = np.zeros(NUM_SLOTS, dtype=np.int32)
        states = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_reqs=NUM_SLOTS,
            vocab_size=VOCAB,
            all_token_ids=None,
            prompt_len=SimpleNamespace(np=self.prompts),
            prefill_len=SimpleNamespace(np=self.prefills),
            total_len=None,
        )
        # vLLM's own loader, which refuses a class of the first runner's
        (self.processor,) = build_custom_logits_processors(None, states, False, [GPU_ENTROPY_PROCESSOR])

    def add(self, slot, response, *, prompt=3, sampled=0, temperature=1.0):
        from vllm import SamplingParams

        wanted = {} if response is None else {REQUEST_KEY: response}
        self.prompts[slot], self.prefills[slot] = prompt, prompt + sampled
        return self.processor.add_request(slot, SamplingParams(extra_args=wanted, temperature=temperature))

    def step(self, seen):
        """One step: slot -> tokens that its row has seen; returns the logits that it was given."""
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

        slots = np.array(list(seen), dtype=np.int32)
        logits = 3 * torch.randn(len(slots), VOCAB)
        ctx = LogitsContext(
            expanded_idx_mapping=torch.from_numpy(slots),
            idx_mapping=torch.from_numpy(slots),
            idx_mapping_np=slots,
            expanded_local_pos=torch.zeros(len(slots), dtype=torch.int32),
            input_ids=torch.zeros(len(slots), dtype=torch.int32),
            pos=torch.tensor([number - 1 for number in seen.values()]),
            seq_lens_upper_bound_np=np.array(list(seen.values()), dtype=np.int32),
        )
        before = logits.clone()
        assert torch.equal(self.processor.apply(logits, ctx), before)
        return dict(zip(seen, before, strict=True))


def entropy(logits, temperature=1.0):
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return float(-(logprobs.exp() * logprobs).sum())


def test_rows_of_slots_that_come_and_go():
    torch.manual_seed(0)
    runner, expected = Runner(), {0: [], 1: [], 2: []}
    assert runner.add(4, 0)
    assert not runner.add(1, None)  # evaluation: its logits are nobody's business
    assert runner.add(2, 1, prompt=5)
    runner.step({4: 2, 1: 3, 2: 3})  # two prompts are not yet complete: what is sampled there is thrown away
    rows = runner.step({2: 5, 1: 4, 4: 3})  # rows are in another order every step
    expected[0].append(entropy(rows[4]))
    expected[1].append(entropy(rows[2]))
    rows = runner.step({4: 4, 2: 6})
    expected[0].append(entropy(rows[4]))
    expected[1].append(entropy(rows[2]))
    assert runner.add(4, 2)  # response 0 is preempted, and response 2 takes its slot
    rows = runner.step({4: 3, 2: 7})
    expected[2].append(entropy(rows[4]))
    expected[1].append(entropy(rows[2]))
    assert runner.add(5, 0, sampled=1)  # it is back in another slot; its last token is sampled again
    rows = runner.step({5: 4})
    expected[0][1] = entropy(rows[5])
    rows = runner.step({5: 5})
    expected[0].append(entropy(rows[5]))
    taken = runner.processor.log.take([0, 1])
    assert runner.processor.log.vocab_size == VOCAB
    assert taken.keys() == {0, 1}
    for response in (0, 1):
        assert taken[response] == pytest.approx(expected[response], abs=2e-6)
    runner.step({5: 6})  # one step past the end
    assert runner.processor.log.take([0, 2]) == {0: [], 2: pytest.approx(expected[2], abs=2e-6)}


def test_a_response_that_is_refilled_in_chunks_keeps_its_entropies():
    """A chunk of a refill samples nothing, though it may end among the tokens that were sampled before."""
    torch.manual_seed(0)
    runner = Runner()
    runner.add(1, 7)
    expected = [entropy(runner.step({1: 3 + position})[1]) for position in range(4)]
    runner.add(2, 7, sampled=4)  # it was preempted, and is filled with seven tokens
    runner.step({2: 2})
    runner.step({2: 5})
    expected += [entropy(runner.step({2: 7 + position})[2]) for position in range(2)]
    assert runner.processor.log.take([7]) == {7: pytest.approx(expected, abs=2e-6)}


def test_a_gap_is_no_shift():
    log = EntropyLog()
    log.note([3, 3, 3], [0, 1, 1], torch.tensor([1.0, 2.0, 2.5]))
    assert log.take([3]) == {3: [1.0, 2.5]}
    log.note([3, 3], [0, 2], torch.tensor([1.0, 3.0]))
    with pytest.raises(RolloutError, match="vLLM's request 3: an entropy of token 2 after those of 1 tokens"):
        log.take([3])


@pytest.mark.parametrize("temperatures", [(0.6, 0.6), (0.6, 1.7)])
def test_the_temperature_that_vllm_applies_afterwards_counts(temperatures):
    runner = Runner()
    for slot, temperature in enumerate(temperatures):
        runner.add(slot, slot, temperature=temperature)
    rows = runner.step({0: 3, 1: 3})
    taken = runner.processor.log.take([0, 1])
    for slot, temperature in enumerate(temperatures):
        assert taken[slot] == pytest.approx([entropy(rows[slot], temperature)], abs=2e-6)


def test_no_step_waits_for_the_device(monkeypatch):
    """Nothing is read on the host before the responses are taken."""
    runner = Runner()
    for slot in range(3):
        runner.add(slot, slot, temperature=0.5 + slot / 2)

    def read(*_, **__):
        raise AssertionError("a decode step reads a tensor")

    for name in ("tolist", "item", "cpu", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, read)
    runner.processor.apply(torch.zeros(2, VOCAB), context({0: 3, 2: 3}))


def context(seen):
    slots = np.array(list(seen), dtype=np.int32)
    return SimpleNamespace(idx_mapping_np=slots, seq_lens_upper_bound_np=np.array(list(seen.values())))


def test_the_runner_that_the_processor_is_written_for():
    config = RolloutConfig(entropy_source="rollout")
    assert engine_environment(config, has_gpus=True)["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert engine_environment(config, has_gpus=False)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in engine_environment(RolloutConfig(), has_gpus=True)


def test_a_greedy_slot_is_nobodys_business_alone_or_beside_others():
    torch.manual_seed(0)
    runner = Runner()
    assert not runner.add(0, 7, temperature=0.0)
    runner.step({0: 3})
    assert runner.add(3, 8, temperature=0.5)
    logits = runner.step({0: 4, 3: 3})
    log = runner.processor.log
    assert log.take([8])[8] == pytest.approx([entropy(logits[3], 0.5)], abs=1e-5)
