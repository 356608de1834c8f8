import dataclasses

import pytest

from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.loop.sft_inputs import read_sft_inputs
from recipes import tiny_cpu


def read(**data):
    config = tiny_cpu.sft()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **data))
    return read_sft_inputs(config, load_tokenizer(config.model.path), vocab_size=339)


def test_the_recipe_s_conversations_are_read_and_end_as_the_sampler_ends():
    found = read()
    assert (len(found.train), len(found.heldout)) == (1024, 128)
    end = load_tokenizer(tiny_cpu.sft().model.path).eos_token_id
    assert {one.response_ids[-1] for one in found.train} == {end}
    assert all(all(one.loss_mask) for one in found.train)  # one turn each
    assert {name: content.problems for name, content in found.contents.items()} == {"train": 1024, "eval/heldout": 128}


def test_rows_may_be_held_out_of_the_training_set():
    whole, parted = read(heldout_path=""), read(heldout_path="", heldout_rows=24)
    assert not whole.heldout
    assert list(whole.contents) == ["train"]
    assert (*parted.train, *parted.heldout) == tuple(whole.train)
    assert len(parted.heldout) == 24
    assert read(heldout_rows=24).heldout == read().heldout[:24]


def test_more_than_there_is_is_refused():
    with pytest.raises(ConfigError, match="data.rows_per_step=2000 exceeds the 1024 conversations"):
        read(rows_per_step=2000)
    with pytest.raises(ConfigError, match="data.heldout_rows=1024 leaves none of the 1024 conversations"):
        read(heldout_path="", heldout_rows=1024)
