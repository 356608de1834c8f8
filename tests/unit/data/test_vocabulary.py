"""A teacher reads the student's tokens: the same numbers must mean the same texts."""

import pytest

from gtpo_megatron.data.vocabulary import check_same_tokens
from gtpo_megatron.errors import ConfigError


class Vocabulary:
    """The one thing that is asked of a tokenizer."""

    def __init__(self, *tokens, **also):
        self.tokens = {token: number for number, token in enumerate(tokens)} | also

    def get_vocab(self):
        return self.tokens


STUDENT = Vocabulary("a", "b", "<|end|>")


@pytest.mark.parametrize(
    ("teacher", "num_rows"),
    [
        (STUDENT, 3),
        (STUDENT, 128),  # rows that no tokenizer has
        (Vocabulary("a", "b", "<|end|>", "<think>"), 4),  # a token more
        (Vocabulary("a", "b", "<|end|>", c=9), 3),  # which the student never samples
    ],
)
def test_the_same_tokens_are_taken(teacher, num_rows):
    check_same_tokens(STUDENT, teacher, teacher_path="t", num_rows=num_rows)


@pytest.mark.parametrize(
    ("teacher", "num_rows", "message"),
    [
        (
            Vocabulary("a", "c", "<|end|>"),
            3,
            r"t: token 1 is 'c', that of model.path is 'b' \(1 of 3 differ\); a teacher",
        ),
        (Vocabulary("b", "a", "<|end|>"), 3, r"token 0 is 'b', that of model.path is 'a' \(2 of 3 differ\)"),
        (Vocabulary("a", "b"), 3, r"token 2 is nothing, that of model.path is '<\|end\|>' \(1 of 3 differ\)"),
        (STUDENT, 2, "its embedding has 2 rows, and token 2 of model.path's tokenizer needs a row"),
    ],
)
def test_others_are_refused_by_name(teacher, num_rows, message):
    with pytest.raises(ConfigError, match=message):
        check_same_tokens(STUDENT, teacher, teacher_path="t", num_rows=num_rows)
