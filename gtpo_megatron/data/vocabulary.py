"""Whether two models read the same tokens: a teacher scores what a student has sampled."""

from typing import TYPE_CHECKING

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import printable, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_same_tokens(
    student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase", *, teacher_path: str, num_rows: int
) -> None:
    """Checks that every token of the student's tokenizer is the same token of the teacher's.

    How texts are split may differ, and so may what the teacher has besides, since it reads the student's tokens. Rows
    of an embedding that no tokenizer has are no obstacle either: of one family their number depends on the size.

    Args:
        student: the student's tokenizer.
        teacher: the teacher's.
        teacher_path: its folder, for messages.
        num_rows: rows of the teacher's embedding.

    Raises:
        ConfigError: one is not.
    """
    ours, theirs = ({number: token for token, number in one.get_vocab().items()} for one in (student, teacher))
    where = f"teacher.path={printable(teacher_path)}"
    remedy = "a teacher scores the student's tokens, so it must have its tokenizer; take one of the same family"
    different = [number for number in sorted(ours) if theirs.get(number) != ours[number]]
    if different:
        number = different[0]
        found = shown(theirs[number]) if number in theirs else "nothing"
        raise ConfigError(
            f"{where}: token {number} is {found}, that of model.path is {shown(ours[number])} ({len(different)} of "
            f"{len(ours)} differ); {remedy}"
        )
    if (last := max(ours)) >= num_rows:
        raise ConfigError(
            f"{where}: its embedding has {num_rows} rows, and token {last} of model.path's tokenizer needs a row; "
            f"{remedy}"
        )
