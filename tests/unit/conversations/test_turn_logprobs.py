"""A sequence that was joined turn by turn has the log-probs with which its tokens were sampled."""

import pytest
import torch

from gtpo_megatron.conversations.messages import Message, Opening
from tests.unit.conversations.families import FAMILIES, bridge_of, id_of, tokenizer_of

REPLIES = (
    [Message(role="tool", content="42", tool="add", call_id="abcdefgh1")],
    [Message(role="user", content="Wrong, 你好.")],
    [Message(role="user", content="Again.")],
)
TURN = 12
"""Sampled tokens of a turn; every second one is cut, the others end with a stop token."""


def tiny_model(vocabulary):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=vocabulary, num_hidden_layers=2, initializer_range=0.5, **sizes)
    return Qwen2ForCausalLM(config).eval()


class Sampler:
    """Reads each new token once, keeps keys and values, and samples one token at a time."""

    def __init__(self, model):
        self.model, self.cache, self.generator = model, None, torch.Generator().manual_seed(2)

    def logprobs(self, ids):
        """Of the next token, after these."""
        found = self.model(torch.tensor([ids]), past_key_values=self.cache, use_cache=True)
        self.cache = found.past_key_values
        return found.logits[0, -1].log_softmax(-1)

    def turn(self, prompt, stop):
        """Ids and log-probs of a turn; ``stop`` takes the place of its last token if it is not None."""
        ids, logprobs, next_ones = [], [], self.logprobs(prompt)
        for i in range(TURN):
            drawn = int(torch.multinomial(next_ones.exp(), 1, generator=self.generator))
            ids.append(stop if stop is not None and i == TURN - 1 else drawn)
            logprobs.append(float(next_ones[ids[-1]]))
            next_ones = self.logprobs(ids[-1:])
        return ids, logprobs


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_logprobs_of_turns_are_those_of_the_whole_sequence(name):
    bridge, tokenizer = bridge_of(name), tokenizer_of(name)
    model = tiny_model(len(tokenizer) + 5)
    sampler, stop = Sampler(model), id_of(name, FAMILIES[name].end)
    foreign = bridge.opening(Opening(messages=(Message(role="user", content="1+1"),)))
    sequence, places, logprobs = [], [], []
    for number, reply in enumerate(REPLIES):
        said, own = sampler.turn(foreign, stop if number % 2 else None)
        places += range(len(sequence) + len(foreign), len(sequence) + len(foreign) + TURN)
        sequence += [*foreign, *said]
        logprobs += own
        foreign = bridge.next_turn(said, reply)
    whole = model(torch.tensor([sequence])).logits[0].log_softmax(-1)
    found = torch.stack([whole[place - 1, sequence[place]] for place in places])
    assert found.std() > 0.5  # a flat distribution would prove nothing
    assert (found - torch.tensor(logprobs)).abs().max() < 1e-4
