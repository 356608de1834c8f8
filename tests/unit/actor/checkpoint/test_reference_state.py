"""A run goes on with the teacher that it had."""

from pathlib import Path

import pytest

from gtpo_megatron.errors import CheckpointError

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

FILES = {"model.safetensors": "12ab"}


def test_the_same_teacher_is_taken_and_others_are_refused():
    from gtpo_megatron.actor.checkpoint.reference_state import check_teacher

    folder = Path("step_2")
    check_teacher(FILES, {"teacher": {"files": dict(FILES)}}, folder)
    with pytest.raises(CheckpointError, match="a run without a teacher; resume with the configuration"):
        check_teacher(FILES, {}, folder)
    for other in ({"model.safetensors": "34cd"}, {}, {**FILES, "more.safetensors": "5"}):
        with pytest.raises(CheckpointError, match="is of a run with another teacher: .*teacher.path held"):
            check_teacher(FILES, {"teacher": {"files": other}}, folder)
