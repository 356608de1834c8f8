"""Takes a model's thinking off the text of its turn."""

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Marks around thinking; the second pair is Mistral's."""


def split_thinking(text: str, marks: tuple[str, str] = THINKING[0], *, is_open: bool = False) -> tuple[str, str]:
    """Thinking, and the text after it; linear in the length of the text.

    Thinking that was never closed has no text after it. Without its opening mark a text is thinking up to the closing
    one.

    Args:
        text: of one turn.
        marks: around its thinking.
        is_open: the prompt ends with the opening mark, so that a text without any mark is thinking.
    """
    opening, closing = marks
    begins = text.lstrip().startswith(opening)
    body = text.lstrip().removeprefix(opening) if begins else text
    before, mark, after = body.partition(closing)
    if mark and (begins or opening not in before):
        return before.strip("\n"), after.lstrip("\n")
    if not mark and (begins or is_open):
        return body.strip("\n"), ""
    return "", text
