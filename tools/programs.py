"""Generates short programming problems with written solutions, a task small enough for a CPU.

A problem shows the first four values of a function: ``f(0)=5, f(1)=8, f(2)=11, f(3)=14``. A solution
writes down the differences of the values, then a lambda in a code block. Half of the solutions that the model is warmed
up on are careless: one constant, or the kind of function, is wrong. So the policy knows the right program as well as
wrong ones, and the tests say which is which.
"""

import random
from dataclasses import dataclass, replace

INSTRUCTION = "Write f in Python."
"""The end of every prompt."""

SHOWN_INPUTS = range(4)
"""Inputs whose values a prompt shows."""
HIDDEN_INPUTS = (5, 9, 12, 20)
"""Inputs of the tests, beyond the shown ones."""


@dataclass(frozen=True, slots=True)
class Program:
    """A function of one integer.

    Attributes:
        kind: key of ``KINDS``.
        a: first constant.
        b: second constant; 0 if the kind has none.
    """

    kind: str
    a: int
    b: int = 0

    def __call__(self, x: int) -> int:
        """The value at ``x``."""
        a, b = self.a, self.b
        match self.kind:
            case "line":
                return a * x + b
            case "square":
                return x * x + a
            case "product":
                return x * (x + a) + b
            case "remainder":
                return x % a + b
            case "falling":
                return b - a * x
        raise AssertionError(self.kind)

    @property
    def text(self) -> str:
        """The function as a lambda."""
        return KINDS[self.kind].text.format(a=self.a, b=self.b)


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of functions.

    Attributes:
        text: as a lambda, with the constants in braces.
        first: range of the first constant.
        second: range of the second constant.
    """

    text: str
    first: range
    second: range


KINDS = {
    "line": Kind("lambda x: {a}*x+{b}", range(1, 10), range(0, 60)),
    "square": Kind("lambda x: x*x+{a}", range(0, 60), range(1)),
    "product": Kind("lambda x: x*(x+{a})+{b}", range(1, 8), range(0, 20)),
    "remainder": Kind("lambda x: x%{a}+{b}", range(2, 4), range(0, 30)),
    "falling": Kind("lambda x: {b}-{a}*x", range(1, 6), range(40, 90)),
}


def sample_program(rng: random.Random) -> Program:
    """Draws a kind and its constants."""
    name = rng.choice(list(KINDS))
    return Program(name, rng.choice(KINDS[name].first), rng.choice(KINDS[name].second))


def careless(program: Program, rng: random.Random) -> Program:
    """A similar program: one constant, or the kind, is wrong."""
    kind = KINDS[program.kind]
    match rng.randrange(3):
        case 0:
            return replace(program, a=max(kind.first.start, program.a + rng.choice((-1, 1))))
        case 1:
            return replace(program, b=max(0, program.b + rng.choice((-2, -1, 1, 2))))
        case _:
            return sample_program(rng)


def prompt_text(program: Program) -> str:
    """The user's message."""
    return f"{', '.join(f'f({x})={program(x)}' for x in SHOWN_INPUTS)}. {INSTRUCTION}"


def sample_solution(program: Program, rng: random.Random, *, careless_rate: float) -> str:
    """Writes a solution: the differences of the shown values, and a program that is careless at this rate."""
    steps = " ".join(str(program(x + 1) - program(x)) for x in SHOWN_INPUTS[:-1])
    written = careless(program, rng) if rng.random() < careless_rate else program
    opening = rng.choice(("Steps", "Differences", "It goes"))
    return f"{opening} {steps}.\n```python\nf = {written.text}\n```"
