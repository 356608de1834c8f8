"""Takes a model's thinking off the text of its turn."""

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Marks around thinking; the second pair is Mistral's."""


def split_thinking(text: str, marks: tuple[str, str] = THINKING[0], *, is_open: bool = False) -> tuple[str, str]:
    """Thinking, and the text after it; linear in the length of the text.

    Thinking goes to the first closing mark; what was never closed has no text after it. Who has not opened any, and was
    not made to by the prompt, writes text: a closing mark alone hides nothing from a grader.

    Args:
        text: text of one turn.
        marks: around its thinking.
        is_open: the prompt ends with the opening mark.
    """
    opening, closing = marks
    begins = text.lstrip().startswith(opening)
    if not (begins or is_open):
        return "", text
    body = text.lstrip().removeprefix(opening) if begins else text
    thinking, _, after = body.partition(closing)
    return thinking.strip("\n"), after.lstrip("\n")
