"""The environment of ``recipes.tiny_cpu:tool_gtpo``: arithmetic with a calculator.

It is an example, too: a class whose public methods are tools, of which the policy is told by their signatures.
"""

import re
from math import prod

from gtpo_megatron.conversations.messages import Message
from gtpo_megatron.conversations.tools import ToolEnvironment

_PRODUCT = r"\d{1,6}(?:\*\d{1,6}){0,9}"
_TERM = re.compile(rf"([+-]?)({_PRODUCT})")
_EXPRESSION = re.compile(rf"[+-]?{_PRODUCT}(?:[+-]{_PRODUCT})*")


class Calculator(ToolEnvironment):
    """A problem, and a tool that computes; a turn without a call is the answer."""

    def reset(self, answer: str) -> None:
        """Keeps the answer of the row; its prompt stays as it is."""
        self._answer = answer

    def calculate(self, expression: str) -> int:
        """Computes sums, differences and products of whole numbers.

        Args:
            expression: such as 20+4*3-14.
        """
        if not _EXPRESSION.fullmatch(expression):
            raise ValueError(f"{expression!r} is no sum of whole numbers and products of them")
        terms = _TERM.findall(expression)
        return sum((-1 if sign == "-" else 1) * prod(map(int, factors.split("*"))) for sign, factors in terms)

    def reward(self, message: Message) -> float:
        """1 if the last box has the answer, else 0."""
        boxes = re.findall(r"\\boxed\{(-?\d+)\}", message.content)
        return float(boxes[-1:] == [self._answer])
