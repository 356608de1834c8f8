"""What a chat template is given besides the messages: options, and one date; and where it ends a turn."""

import dataclasses
import datetime
import json
import shutil

import pytest

from gtpo_megatron.data.chat_template import (
    TemplateInputs,
    asks_for_date,
    load_tokenizer,
    render_prompt,
    stop_token_ids,
    unstopped_turn,
)
from gtpo_megatron.data.prompts import load_problems
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.loop.inputs import read_inputs
from recipes import tiny_cpu

TINY = tiny_cpu.ASSETS / "tiny_qwen2"
DATED = "Today: {{ strftime_now('%d %b %Y') }}\n{{ messages[0]['content'] }}"
LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- endif %}{{ date_string }}: {{ messages[0]['content'] }}"
)
MACRO = "{%- macro day() %}{{ strftime_now('%Y-%m-%d') }}{%- endmacro %}{{ day() }} {{ messages[0]['content'] }}"
THINKING = (
    "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
EFFORT = "{{ messages[0]['content'] }} Reasoning: {{ reasoning_effort | default('medium') }}"


def with_template(template):
    tokenizer = load_tokenizer(str(TINY))
    tokenizer.chat_template = template
    return tokenizer


def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "1+1", "answer": "2"}) + "\n", encoding="utf-8")
    return str(path)


def loaded(tmp_path, template, **given):
    given = TemplateInputs(**given)
    return load_problems(rows(tmp_path), with_template(template), max_prompt_tokens=300, given=given)


def text(problems, template):
    return with_template(template).decode(list(problems.problems[0].prompt_ids))


@pytest.mark.parametrize("template", [DATED, LLAMA, MACRO])
def test_a_template_is_told_one_date_and_the_digests_know_it(tmp_path, template):
    day, again, other = (loaded(tmp_path, template, date=f"2026-11-{number}") for number in (24, 24, 25))
    assert asks_for_date(with_template(template))
    assert "24" in text(day, template)
    assert "2026" in text(day, template)
    assert day.problems == again.problems
    assert (day.content_sha256, day.used_sha256) == (again.content_sha256, again.used_sha256)
    assert day.problems != other.problems
    assert day.content_sha256 != other.content_sha256
    assert day.used_sha256 != other.used_sha256


def test_the_machine_s_clock_is_not_asked_when_a_date_is_given(tmp_path, monkeypatch):
    import transformers.utils.chat_template_utils as utils

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):  # noqa: ARG003 - as its own
            return cls(2031, 5, 6)

    monkeypatch.setattr(utils, "datetime", Later)
    assert "2031" not in text(loaded(tmp_path, DATED, date="2026-11-24"), DATED)
    assert "2031" not in text(loaded(tmp_path, DATED), DATED)


def test_a_template_without_a_date_has_the_same_digests_every_day(tmp_path):
    one, other = (loaded(tmp_path, THINKING, date=f"2026-11-{day}") for day in (24, 25))
    assert not asks_for_date(with_template(THINKING))
    assert (one.content_sha256, one.used_sha256) == (other.content_sha256, other.used_sha256)


@pytest.mark.parametrize(
    ("template", "options", "written"),
    [
        (THINKING, {"enable_thinking": False}, "<think></think>"),
        (EFFORT, {"reasoning_effort": "high"}, "Reasoning: high"),
        (
            "{% if style is defined %}{{ style.name }}{{ style.levels[1] }}{% endif %}",
            {"style": {"name": "brief", "levels": [1, 2]}},
            "brief2",
        ),
    ],
)
def test_options_reach_the_template_and_the_digests(tmp_path, template, options, written):
    without, given = loaded(tmp_path, template), loaded(tmp_path, template, options=options)
    assert written in text(given, template)
    assert written not in text(without, template)
    assert without.content_sha256 != given.content_sha256
    assert without.used_sha256 != given.used_sha256


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_thinkng": False}, "has no option 'enable_thinkng'; it mentions enable_thinking"),
        ({"messages": []}, "has no option 'messages'"),
        ({"add_generation_prompt": False}, "has no option 'add_generation_prompt'"),
        ({"strftime_now": "x"}, "has no option 'strftime_now'"),
        ({"tokenize": True}, "has no option 'tokenize'"),
        ({"enable_thinking": True, "reasoning_effort": "low"}, "has no option 'reasoning_effort'"),
    ],
)
def test_an_option_that_the_template_does_not_mention_is_refused_by_name(tmp_path, options, named):
    with pytest.raises(ConfigError, match=named):
        loaded(tmp_path, THINKING, options=options)


def test_a_run_reads_training_and_heldout_sets_alike(tmp_path):
    config = tiny_cpu.gtpo()
    data = dataclasses.replace(
        config.data,
        train_path=rows(tmp_path),
        max_prompt_tokens=96,
        template_options={"enable_thinking": False},
        template_date="2026-01-31",
    )
    evaluation = dataclasses.replace(config.evaluation, path=rows(tmp_path))
    config = dataclasses.replace(config, data=data, evaluation=evaluation)
    found = read_inputs(config, with_template(THINKING + "{{ strftime_now('%Y-%m-%d') }}"))
    prompts = {found.tokenizer.decode(list(one.prompt_ids)) for one in (found.train[0], found.heldout[0].problems[0])}
    assert all(prompt.endswith("<think></think>2026-01-31") for prompt in prompts)
    assert len(prompts) == 1
    assert found.template_date == "2026-01-31"
    assert "told 2026-01-31" in "\n".join(found.notes)


def base_folder(tmp_path, template, eos=("<|endoftext|>",), name="generation_config.json"):
    """A folder as of Qwen2.5-base: a chat template, and another end of sequence."""
    folder = tmp_path / "base"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_special_tokens({"eos_token": eos[0]})
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    (folder / "generation_config.json").unlink()
    ids = tokenizer.convert_tokens_to_ids(list(eos))
    (folder / name).write_text(json.dumps({"eos_token_id": ids if len(ids) > 1 else ids[0]}), encoding="utf-8")
    return folder, tokenizer


GEMMA = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("template", [None, GEMMA])
def test_a_template_whose_end_of_turn_stops_nothing_is_named(tmp_path, template, name):
    folder, tokenizer = base_folder(tmp_path, template, name=name)
    stops = stop_token_ids(folder, tokenizer)
    found = unstopped_turn(tokenizer, TemplateInputs(), stops)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert f"ends a turn with <|im_end|> ({end})" in found
    assert f"<|endoftext|> ({tokenizer.eos_token_id})" in found
    assert not unstopped_turn(tokenizer, TemplateInputs(), [*stops, end])
    assert not unstopped_turn(tokenizer, TemplateInputs(), stops, ["<|im_end|>"])


@pytest.mark.parametrize("eos", [("<|im_end|>",), ("<|endoftext|>", "<|im_end|>")])
def test_a_template_whose_end_of_turn_stops_is_none_of_them(tmp_path, eos):
    folder, tokenizer = base_folder(tmp_path, None, eos=eos)
    assert not unstopped_turn(tokenizer, TemplateInputs(), stop_token_ids(folder, tokenizer))


@pytest.mark.parametrize("template", [DATED, "{{ messages[0].content }}\n", "{{ raise_exception('no answers') }}"])
def test_a_template_that_ends_no_turn_is_none_of_them(template):
    assert not unstopped_turn(with_template(template), TemplateInputs(), [2])


def test_a_prompt_without_options_is_as_transformers_renders_it():
    tokenizer = load_tokenizer(str(TINY))
    messages = [{"role": "user", "content": "1+1"}]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(render_prompt(tokenizer, messages)) == list(wanted)
