import pytest

from gtpo_megatron.data.chat_template import load_tokenizer, render_prompt
from gtpo_megatron.errors import DataError

TINY = "assets/tiny_qwen2"


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
