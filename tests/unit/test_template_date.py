"""A run's prompts are of one day, however often it is resumed and whenever its model is evaluated."""

import dataclasses
import io
import json
import shutil

import pytest
from rich.console import Console

from gtpo_megatron import train
from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli import evaluate as evaluate_cli
from gtpo_megatron.companions.evaluate import evaluation_run
from gtpo_megatron.config.serialize import load_config, to_yaml
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.loop import inputs
from recipes import tiny_cpu

DATED = "{{ strftime_now('%Y-%m-%d') }}{{ messages[0]['content'] }}{% if brief is defined %} Brief.{% endif %}"


class StartedError(Exception):
    """Instead of processes."""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begins a run, or goes on with it, on a day, up to the start of its processes; returns what it has read."""
    model = shutil.copytree(tiny_cpu.ASSETS / "tiny_qwen2", tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2"}) + "\n", encoding="utf-8")
    seen = []

    def started(*_, inspector=None):
        raise StartedError

    def read(*arguments, **options):
        seen.append(inputs.read_inputs(*arguments, **options))
        return seen[-1]

    def begin(day, *, template=DATED, resume=False, folder="run", **data):
        (model / "chat_template.jinja").write_text(template, encoding="utf-8")
        for module in (inputs, evaluation_run):
            monkeypatch.setattr(module, "today", lambda: day)
        rows = str(tmp_path / "rows.jsonl")
        config = tiny_cpu.gtpo()
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, path=str(model)),
            data=dataclasses.replace(
                config.data, **({"train_path": rows, "prompts_per_step": 1, "max_prompt_tokens": 64} | data)
            ),
            evaluation=dataclasses.replace(config.evaluation, path=rows),
        )
        with pytest.raises(StartedError):
            train.train(config, run_dir=tmp_path / folder, resume=resume, console=Console(file=io.StringIO()))
        found = seen[-1]
        return {found.tokenizer.decode(list(one.prompt_ids)) for one in (*found.train, *found.heldout[0].problems)}

    monkeypatch.setattr(train, "_stages", started)
    monkeypatch.setattr(train, "set_up_logs", lambda **_: None)
    monkeypatch.setattr(train, "read_inputs", read)
    return begin


def test_a_resumed_run_has_the_prompts_of_its_first_day(begin, tmp_path):
    assert begin("2026-11-24") == {"2026-11-241+1"}
    assert load_config(tmp_path / "run" / "config.yaml").data.template_date == "2026-11-24"
    assert begin("2026-11-25", resume=True) == {"2026-11-241+1"}
    assert begin("2026-11-25", folder="other") == {"2026-11-251+1"}
    assert begin("2026-11-25", folder="fixed", template_date="2020-02-29") == {"2020-02-291+1"}
    with pytest.raises(ConfigError, match="template_date: '2026-11-24' -> '2026-11-26'"):
        begin("2026-11-25", resume=True, template_date="2026-11-26")


def test_a_template_that_has_a_date_now_is_not_resumed(begin, tmp_path):
    assert begin("2026-11-24", template="{{ messages[0]['content'] }}") == {"1+1"}
    assert load_config(tmp_path / "run" / "config.yaml").data.template_date == ""
    with pytest.raises(ConfigError, match="template_date: '' -> '2026-11-25'"):
        begin("2026-11-25", resume=True)


def evaluated(monkeypatch, tmp_path, *arguments):
    """The prompts that ``evaluate`` would sample from."""
    seen = []

    def measure(model, config, file, wanted, tokenizer, *_):
        seen.extend(tokenizer.decode(list(one.problem.prompt_ids)) for one in wanted)

    monkeypatch.setattr(evaluation_run, "_measure", measure)
    monkeypatch.setattr(evaluation_run, "set_up_logs", lambda **_: None)
    assert evaluate_cli.run([*arguments, "--output", str(tmp_path / "evaluation"), "--samples", "1"]) == 0
    return set(seen)


@pytest.mark.filterwarnings("ignore")
def test_a_run_s_model_is_evaluated_on_the_prompts_of_its_first_day(begin, tmp_path, monkeypatch):
    begin("2026-11-24", template_options={"brief": True})
    shutil.copytree(tmp_path / "model", tmp_path / "run" / "hf")
    begin("2026-11-25", folder="other")
    assert evaluated(monkeypatch, tmp_path, str(tmp_path / "run")) == {"2026-11-241+1 Brief."}


def test_a_model_s_evaluation_goes_on_with_its_first_day(begin, tmp_path, monkeypatch):
    begin("2026-11-24")
    arguments = (str(tmp_path / "model"), "--benchmarks", f"mine={tmp_path / 'rows.jsonl'}")
    assert evaluated(monkeypatch, tmp_path, *arguments) == {"2026-11-241+1"}
    begin("2026-11-25", folder="other")
    assert evaluated(monkeypatch, tmp_path, *arguments) == {"2026-11-241+1"}
    with pytest.raises(ConfigError, match="another evaluation: template_inputs"):
        evaluated(monkeypatch, tmp_path, *arguments, "--template-date", "2026-11-25")
    with pytest.raises(ConfigError, match="another evaluation: template_inputs"):
        evaluated(monkeypatch, tmp_path, *arguments, "--template-options", '{"brief": true}')
    with pytest.raises(ConfigError, match="no option 'brieff'"):
        evaluated(monkeypatch, tmp_path, *arguments, "--template-options", '{"brieff": true}')


def test_options_and_date_are_read_again_from_a_configuration(begin, tmp_path, capsys):
    begin("2026-11-24", template_options={"brief": {"a": [1, None, "x: y"]}})
    recorded = tmp_path / "run" / "config.yaml"
    assert dispatch.run(["config", str(recorded)]) == 0
    assert capsys.readouterr().out == recorded.read_text(encoding="utf-8") == to_yaml(load_config(recorded))
