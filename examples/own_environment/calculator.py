"""Your own environment: a calculator as tools, and a reward for the right number at the end."""

import re

from gtpo_megatron.conversations.messages import Message
from gtpo_megatron.conversations.tools import ToolEnvironment
from gtpo_megatron.rewards.request import Reward


class Calculator(ToolEnvironment):
    """Public methods are the tools; a turn that calls none is the answer."""

    def reset(self, answer: str) -> str:
        """Takes the column `answer`; what is returned is added to its prompt."""
        self.answer = answer
        self._num_calls = 0
        return "\nUse the tools, then write the number alone."

    def add(self, a: float, b: float) -> float:
        """Adds two numbers.

        Args:
            a: the first number.
            b: the second number.
        """
        self._num_calls += 1
        return a + b

    def multiply(self, a: float, b: float) -> float:
        """Multiplies two numbers.

        Args:
            a: the first number.
            b: the second number.
        """
        self._num_calls += 1
        return a * b

    def reward(self, message: Message) -> Reward:
        """1 for the right number, 0 for any other; how often tools were called is a metric."""
        numbers = re.findall(r"-?\d+(?:\.\d+)?", message.content)
        is_right = bool(numbers) and float(numbers[-1]) == float(self.answer)
        return Reward(float(is_right), parts={"tool_calls": float(self._num_calls)})
