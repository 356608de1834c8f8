"""The calculator of a recipe, and that of an example, which is a page of its own."""

import json
import random

import pytest

from gtpo_megatron.config.named_function import named_function
from recipes.calculator import Calculator


def of_recipe(expression):
    return Calculator().calculate(expression)


def of_example(expression):
    calculate = named_function("examples/own_agent/agent.py:calculate", what="function", example="")
    answer = calculate(json.dumps({"expression": expression}))
    if answer.startswith("Error: "):
        raise ValueError(answer.removeprefix("Error: "))
    return int(answer)


@pytest.mark.parametrize("calculate", [of_recipe, of_example])
def test_sums_and_products_are_computed(calculate):
    rng = random.Random(0)
    for _ in range(300):
        terms = ["*".join(str(rng.randint(1, 99)) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 5))]
        expression = "".join(rng.choice("+-") + term for term in terms)
        expression = expression[rng.randint(0, 1) :]
        assert calculate(expression) == eval(expression)
    assert calculate("*".join(["999999"] * 10)) == 999999**10


@pytest.mark.parametrize("calculate", [of_recipe, of_example])
@pytest.mark.parametrize(
    "expression",
    [
        "",
        "+",
        "1000000",
        "1234567*2",
        "2+1234567",
        "*".join("1" * 11),
        "1 + 2",
        "1+2\n",
        "2**3",
        "1++2",
        "2+",
        "(1+2)*3",
    ],
)
def test_what_is_no_such_expression_is_an_error_and_no_other_number(calculate, expression):
    with pytest.raises(ValueError, match="is no sum of whole numbers and products of them"):
        calculate(expression)
