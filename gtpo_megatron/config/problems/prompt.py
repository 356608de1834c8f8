"""Instructions around the bare questions of a benchmark."""

from gtpo_megatron.errors import ConfigError

PLACEHOLDER = "{problem}"

BOXED_TEMPLATE = PLACEHOLDER + "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""Qwen's instruction; most instruct models know it."""

DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    + PLACEHOLDER
    + '\n\nRemember to put your answer on its own line after "Answer:".'
)
"""The one around every prompt of DAPO-Math-17k; for models trained on it."""

CODE_TEMPLATE = (
    PLACEHOLDER + "\n\nThink step by step, then write the whole program in Python, in one code block at the end: "
    "```python\n...\n```"
)
"""Ours, for programming problems; ``rewards/code_tests.py`` takes the last code block."""


def check_template(field: str, template: str) -> None:
    """Raises ConfigError unless the template has one place for the question."""
    if template.count(PLACEHOLDER) != 1:
        raise ConfigError(
            f"{field}={template!r}: must hold {PLACEHOLDER} once, where the question goes; "
            f"{PLACEHOLDER} alone gives the question as it is"
        )


def fill_template(template: str, problem: str) -> str:
    """The template with the question in its place; other braces stay as they are."""
    return template.replace(PLACEHOLDER, problem)
