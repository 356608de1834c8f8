"""Generates integer arithmetic problems with written solutions, a task small enough for a CPU.

A problem is a sum of signed terms, some of them products: ``7*8+35-19+42``. A solution rewrites it step by step: each
step computes one product or combines some of the terms, in any order and in one of several wordings, then writes what
remains. So a policy has choices: a *leap* that combines three terms at once is shorter and more often wrong than two
terms at a time.
"""

import random
from dataclasses import dataclass

from gtpo_megatron.errors import ConfigError

INSTRUCTION = "Put the answer in \\boxed{}."
"""The end of every prompt; the reward reads the last box."""

_OPENERS = ("First", "Start with", "Take")
_CONTINUERS = ("Then", "Next", "Now")
_LINKS = (", leaving", ", so", ", giving")
_CLOSERS = ("The answer is", "So it is", "Result:")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticTask:
    """Bounds of the generated problems.

    Attributes:
        min_terms: least number of signed terms.
        max_terms: greatest number of signed terms.
        max_operand: greatest plain number; the least is 2.
        max_factor: greatest factor of a product; the least is 2.
        max_products: greatest number of terms that are products.
        max_answer: greatest answer; the least is 1.
    """

    min_terms: int = 3
    max_terms: int = 4
    max_operand: int = 30
    max_factor: int = 9
    max_products: int = 1
    max_answer: int = 99

    def __post_init__(self) -> None:
        if not 2 <= self.min_terms <= self.max_terms:
            raise ConfigError(
                f"min_terms={self.min_terms}, max_terms={self.max_terms}; need 2 <= min_terms <= max_terms"
            )
        if min(self.max_operand, self.max_factor) < 2:
            raise ConfigError(f"max_operand={self.max_operand}, max_factor={self.max_factor}; both must be at least 2")
        if self.max_products < 0 or self.max_answer < 1:
            raise ConfigError(f"max_products={self.max_products}, max_answer={self.max_answer}; need at least 0 and 1")


@dataclass(frozen=True, slots=True)
class Term:
    """One signed term: ``sign`` (+1 or -1) times the product of one or two natural ``factors``."""

    sign: int
    factors: tuple[int, ...]

    @property
    def value(self) -> int:
        """The signed value."""
        product = self.sign
        for factor in self.factors:
            product *= factor
        return product


Expression = tuple[Term, ...]
"""A sum of signed terms; the first one is positive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of a solution: ``operands=result``, and the expression that remains after it."""

    operands: str
    result: int
    remaining: Expression


def evaluate(expression: Expression) -> int:
    """The value of the sum."""
    return sum(term.value for term in expression)


def render(expression: Expression) -> str:
    """The expression as text without blanks, for example ``7*8+35-19``."""
    text = "".join(("+" if term.sign > 0 else "-") + "*".join(map(str, term.factors)) for term in expression)
    return text.removeprefix("+")


def canonical(expression: Expression) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """A key that is equal for two expressions if and only if they differ only in the order of terms or factors."""
    return tuple(sorted((term.sign, tuple(sorted(term.factors))) for term in expression))


def prompt_text(expression: Expression) -> str:
    """The user's message."""
    return f"Compute {render(expression)}. {INSTRUCTION}"


def sample_expression(task: ArithmeticTask, rng: random.Random) -> Expression:
    """Draws an expression whose value lies in ``[1, task.max_answer]`` (by rejection)."""
    while True:
        num_terms = rng.randint(task.min_terms, task.max_terms)
        num_products = rng.randint(0, min(task.max_products, num_terms))
        factors: list[tuple[int, ...]]
        factors = [(rng.randint(2, task.max_factor), rng.randint(2, task.max_factor)) for _ in range(num_products)]
        factors += [(rng.randint(2, task.max_operand),) for _ in range(num_terms - num_products)]
        rng.shuffle(factors)
        signs = [1] + [rng.choice((1, -1)) for _ in range(num_terms - 1)]
        expression = tuple(Term(sign, numbers) for sign, numbers in zip(signs, factors, strict=True))
        if 1 <= evaluate(expression) <= task.max_answer:
            return expression


def sample_steps(expression: Expression, rng: random.Random, *, leap_rate: float) -> list[Step]:
    """Evaluates an expression step by step, in a random order.

    Args:
        expression: expression with a positive value.
        rng: chooses the terms of each step.
        leap_rate: probability that a step combines three terms instead of two.

    Returns:
        The steps; none if the expression is a number.
    """
    steps: list[Step] = []
    remaining = expression
    while len(remaining) > 1 or len(remaining[0].factors) > 1:
        steps.append(_step(remaining, rng, leap_rate))
        remaining = steps[-1].remaining
    return steps


def sample_solution(expression: Expression, rng: random.Random, *, leap_rate: float) -> str:
    """Writes a solution with random steps and wording.

    Args:
        expression: expression with a positive value.
        rng: chooses the steps and their wording.
        leap_rate: as in :func:`sample_steps`.

    Returns:
        One line per step and a last line with the answer in a box.
    """
    lines: list[str] = []
    for step in sample_steps(expression, rng, leap_rate=leap_rate):
        opener = rng.choice(_CONTINUERS if lines else _OPENERS)
        rest = f"{rng.choice(_LINKS)} {render(step.remaining)}" if len(step.remaining) > 1 else ""
        lines.append(f"{opener} {step.operands}={step.result}{rest}.")
    lines.append(f"{rng.choice(_CLOSERS)} \\boxed{{{evaluate(expression)}}}.")
    return "\n".join(lines)


def _step(expression: Expression, rng: random.Random, leap_rate: float) -> Step:
    """Computes a product, or combines two or three plain terms."""
    products = [i for i, term in enumerate(expression) if len(term.factors) > 1]
    plain = [i for i, term in enumerate(expression) if len(term.factors) == 1]
    if products and (len(plain) < 2 or rng.random() < 0.5):
        chosen = [rng.choice(products)]
        sign = expression[chosen[0]].sign
        operands = render((Term(1, expression[chosen[0]].factors),))
    else:
        size = 3 if len(plain) > 2 and rng.random() < leap_rate else 2
        chosen = sorted(rng.sample(plain, size))
        sign = 1 if sum(expression[i].value for i in chosen) >= 0 else -1
        picked = [Term(sign * expression[i].sign, expression[i].factors) for i in chosen]
        operands = render(_positive_first(picked))
    value = abs(sum(expression[i].value for i in chosen))
    result = Term(sign, (value,))
    remaining = [result if i == chosen[0] else term for i, term in enumerate(expression) if i not in chosen[1:]]
    if value == 0 and len(remaining) > 1:
        remaining.remove(result)
    return Step(operands=operands, result=value, remaining=_positive_first(remaining))


def _positive_first(terms: list[Term]) -> Expression:
    """Moves the first positive term to the front, so that the text needs no leading sign."""
    first = next(i for i, term in enumerate(terms) if term.sign > 0)
    return (terms[first], *terms[:first], *terms[first + 1 :])
