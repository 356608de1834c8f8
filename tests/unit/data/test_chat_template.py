import json
import shutil

import pytest
import sentencepiece as spm

from gtpo_megatron.data.chat_template import load_tokenizer, render_prompt
from gtpo_megatron.errors import DataError

TINY = "recipes/assets/tiny_qwen2"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


def test_text_becomes_one_user_message_and_the_prompt_ends_where_the_response_begins(tokenizer):
    as_text = render_prompt(tokenizer, "Compute 1+2.")
    assert as_text == render_prompt(tokenizer, [{"role": "user", "content": "Compute 1+2."}])
    expected = "<|im_start|>user\nCompute 1+2.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(list(as_text)) == expected


def test_every_message_of_a_chat_is_rendered(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.decode(list(render_prompt(tokenizer, chat))).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n"
    )


def test_verbatim_text_meets_no_template(tokenizer):
    assert tokenizer.decode(list(render_prompt(tokenizer, "Compute 1+2.", verbatim_text=True))) == "Compute 1+2."


@pytest.mark.parametrize("verbatim_text", [False, True])
def test_a_prompt_beyond_the_tokenizers_limit_is_judged_by_the_caller_alone(tokenizer, verbatim_text):
    """transformers would say at a terminal that the model will fail on it, also where the prompt is dropped."""
    assert len(render_prompt(tokenizer, "1+1 " * tokenizer.model_max_length, verbatim_text=verbatim_text)) > 512
    assert not tokenizer.deprecation_warnings


def test_a_tokenizer_without_a_template_is_an_error_for_chats_alone(tokenizer):
    bare = load_tokenizer(TINY)
    bare.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        render_prompt(bare, "Compute 1+2.")
    assert render_prompt(bare, "Compute 1+2.", verbatim_text=True)


def test_a_template_that_refuses_is_a_data_error(tokenizer):
    strict = load_tokenizer(TINY)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="refuses the messages: roles must alternate"):
        render_prompt(strict, "Compute 1+2.")


def test_a_folder_without_a_tokenizer_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(DataError, match="no tokenizer in it"):
        load_tokenizer(str(tmp_path))


# ------------------------------------------------------------------------------------------------------- sentencepiece
SENTENCES = ["Hello 12 + 7 = 19", "  two  spaces", "a\nb", "ünï 你好 ﬁ 😀", "", "x "]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def sentencepiece_model(request, tmp_path_factory):
    """Of some 320 pieces, 256 of them bytes, so that unknown characters are cut into several."""
    folder = tmp_path_factory.mktemp(request.param)
    lines = [f"the value of {a} + {b} is {a + b}, hello world, x = {a * b}" for a in range(40) for b in range(20)]
    (folder / "text").write_text("\n".join(lines), encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        model_type=request.param,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def sentencepiece_folder(folder, model, **tokenizer_config):
    shutil.copyfile(model, folder / "tokenizer.model")
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return str(folder)


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "LlamaTokenizer", "legacy": True}])
def test_a_sentencepiece_model_alone_is_read_by_sentencepiece(sentencepiece_model, tmp_path, config):
    original = spm.SentencePieceProcessor(model_file=str(sentencepiece_model))
    loaded = load_tokenizer(sentencepiece_folder(tmp_path, sentencepiece_model, **config))
    for text in SENTENCES:
        ids = original.encode(text)
        assert loaded.encode(text, add_special_tokens=False) == ids, text
        assert loaded.decode(ids) == original.decode(ids), text
    assert (loaded.eos_token_id, loaded.bos_token_id) == (original.eos_id(), original.bos_id())
    assert len(loaded) == original.vocab_size()
    ids = [*original.encode("is 7"), original.eos_id()]
    assert loaded.decode(ids) == "is 7</s>"
    assert loaded.decode(ids, skip_special_tokens=True) == "is 7"


def test_tokenizer_config_has_its_say_beside_a_sentencepiece_model(sentencepiece_model, tmp_path):
    template = "{{ messages[0].content }}"
    folder = sentencepiece_folder(tmp_path, sentencepiece_model, eos_token="<0x0A>", chat_template=template)
    loaded = load_tokenizer(folder)
    original = spm.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert loaded.eos_token_id == original.piece_to_id("<0x0A>")
    assert render_prompt(loaded, "is 7") == tuple(original.encode("is 7"))


def test_a_damaged_sentencepiece_model_is_a_data_error(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(DataError, match="no tokenizer in it"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("past", [0, 3, 500])
def test_a_sampled_id_past_the_tokenizer_is_no_text(tmp_path, sentencepiece_model, tokenizer, past):
    """A padded embedding has rows for ids that no tokenizer knows, and a sampler may draw one."""
    for loaded in (load_tokenizer(sentencepiece_folder(tmp_path, sentencepiece_model)), tokenizer):
        ids, unknown = loaded.encode("is 7", add_special_tokens=False), len(loaded) + past
        wanted = loaded.decode(ids)
        for skip in (False, True):
            rows = [[*ids, unknown], [unknown, *ids], [ids[0], unknown, *ids[1:]], [unknown]]
            found = loaded.batch_decode(rows, skip_special_tokens=skip)
            assert [one.strip() for one in found] == [wanted.strip()] * 3 + [""]
            assert loaded.decode(rows[0], skip_special_tokens=skip, clean_up_tokenization_spaces=False) == found[0]
        assert not loaded.convert_ids_to_tokens(unknown)
