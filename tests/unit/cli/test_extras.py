"""A library of an extra that is not installed: one line that names the extra, from every command."""

from dataclasses import replace

import pytest

from gtpo_megatron.cli import command, dispatch
from gtpo_megatron.cli.command import require_libraries
from gtpo_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("module", "extra"), [("torch.distributed", "cpu"), ("megatron", "cpu"), ("vllm", "cpu"), ("scipy", "study")]
)
def test_a_missing_library_is_one_line(module, extra, capsys, monkeypatch):
    def lacks(arguments):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setitem(dispatch.COMMANDS, "evaluate", replace(dispatch.COMMANDS["evaluate"], run=lacks))
    assert dispatch.run(["evaluate", "model"]) == 2
    error = capsys.readouterr().err
    assert f"evaluate needs {module.partition('.')[0]}, which is not installed" in error
    assert f"uv pip install 'gtpo-megatron[{extra}]'" in error
    assert error.count("\n") == 1


def test_a_module_of_nobody_s_extra_is_a_defect(monkeypatch):
    def lacks(arguments):
        raise ModuleNotFoundError("No module named 'gtpo_megatron.gone'", name="gtpo_megatron.gone")

    monkeypatch.setitem(dispatch.COMMANDS, "evaluate", replace(dispatch.COMMANDS["evaluate"], run=lacks))
    with pytest.raises(ModuleNotFoundError):
        dispatch.run(["evaluate", "model"])


def test_a_run_checks_before_it_imports_anything(monkeypatch):
    monkeypatch.setitem(command.EXTRAS, "nowhere_to_be_found", "cpu (runs without a GPU) or gpu")
    require_libraries("json", command="train")
    with pytest.raises(ConfigError, match="train needs nowhere_to_be_found.*extra cpu.*or gpu"):
        require_libraries("json", "nowhere_to_be_found", command="train")
