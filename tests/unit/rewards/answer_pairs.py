r"""Makes pairs of answers whose verdict is known: a reference against its own rewritings, and against a neighbour.

``python -m tests.unit.rewards.answer_pairs`` grades all of them and prints the wrong verdicts and their number by kind.
"""
# ruff: noqa: RUF001 - signs that people write

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gtpo_megatron.rewards.math_answer import math_answer
from gtpo_megatron.rewards.multiple_choice import multiple_choice
from tests.unit.rewards.answer_spellings import SPELLINGS, Draw, Made

SEED = 32
PER_KIND = 60
"""References of each kind."""


@dataclass(frozen=True)
class Pair:
    """An answer to grade, and the right verdict."""

    kind: str
    reference: str
    given: str
    right: float


def integer(draw: Draw) -> Made:
    n = draw.randint(-999_999, 9_999_999)
    right = [str(n), f"{n:,}", f"{n}.0", f"{n:,}".replace(",", r"\,"), f"{n:,}".replace(",", "{,}"), f"${n}$"]
    return (
        str(n),
        [*right, f"{n:,}".replace(",", "\u2009"), f"x = {n}"],
        [str(n + 1), str(n * 10), str(-n - 1), f"{n}.5"],
    )


def decimal(draw: Draw) -> Made:
    places = draw.randint(1, 6)
    digits = draw.randint(1, 10**6) * 10 + draw.randint(1, 9)
    text = f"{digits / 10**places:.{places}f}"
    right = [
        f"{text}0",
        rf"\frac{{{digits}}}{{{10**places}}}",
        rf"{digits} \times 10^{{-{places}}}",
        f"{digits}e-{places}",
    ]
    return text, right, [f"{(digits + 1) / 10**places:.{places}f}", str(digits), f"-{text}"]


def fraction(draw: Draw) -> Made:
    a, b = draw.randint(1, 99), draw.choice([3, 7, 11, 13, 17, 19])
    a += a % b == 0
    k = draw.randint(2, 9)
    right = [
        f"{a}/{b}",
        rf"\dfrac{{{a}}}{{{b}}}",
        rf"\frac{{{k * a}}}{{{k * b}}}",
        rf"\tfrac{{-{a}}}{{-{b}}}",
        f"{a / b:.9f}",
    ]
    wrong = [f"{b}/{a}", rf"\frac{{{a + 1}}}{{{b}}}", f"{a / b:.2f}", rf"-\frac{{{a}}}{{{b}}}"]
    return rf"\frac{{{a}}}{{{b}}}", right, wrong


def mixed(draw: Draw) -> Made:
    n, a, b = draw.randint(1, 40), *draw.choice([(1, 2), (2, 3), (3, 4), (5, 8), (1, 7)])
    right = [f"{n} {a}/{b}", rf"{n}\frac{{{a}}}{{{b}}}", rf"{n}\tfrac{a}{b}", f"{n * b + a}/{b}"]
    return rf"\frac{{{n * b + a}}}{{{b}}}", right, [f"{n}{a}/{b}", rf"{n + 1}\frac{{{a}}}{{{b}}}", f"{n * a}/{b}"]


def scientific(draw: Draw) -> Made:
    mantissa, exponent = draw.randint(11, 99), draw.randint(-30, 30)
    m = f"{mantissa // 10}.{mantissa % 10}"
    right = [rf"{m} \times 10^{{{exponent}}}", f"{m}E{exponent}", rf"{m}\cdot10^{{{exponent}}}", f"{m}×10^{exponent}"]
    wrong = [f"{m}e{exponent + 1}", rf"{m} \times 10^{{{-exponent - 1}}}", m, f"{m}1e{exponent}"]
    return f"{m}e{exponent}", [*right, rf"{mantissa} \times 10^{{{exponent - 1}}}"], wrong


def power(draw: Draw) -> Made:
    b, n = draw.randint(2, 9), draw.randint(3, 120)
    right = [f"{b}^{n}", f"{b}**{n}", rf"{b} \cdot {b}^{{{n - 1}}}", rf"\frac{{{b}^{{{n + 1}}}}}{{{b}}}", str(b**n)]
    inverse = rf"\frac{{1}}{{{b}^{{{n}}}}}"
    return f"{b}^{{{n}}}", right, [f"{b}^{{{n - 1}}}", f"{b + 1}^{{{n}}}", inverse, str(b**n + 1)]


def inverse_power(draw: Draw) -> Made:
    b, n = draw.randint(2, 9), draw.randint(20, 120)
    right = [f"{b}^{{-{n}}}", rf"\frac{{{b}}}{{{b}^{{{n + 1}}}}}", rf"\left(\frac{{1}}{{{b}}}\right)^{{{n}}}"]
    return rf"\frac{{1}}{{{b}^{{{n}}}}}", right, [rf"\frac{{1}}{{{b}^{{{n + 1}}}}}", "0", f"{b}^{{-{n - 1}}}"]


def factorial(draw: Draw) -> Made:
    n = draw.randint(5, 900)
    right = [rf"\frac{{{n + 1}}}{{{n + 1}!}}", rf"\frac{{1}}{{{n} \cdot {n - 1}!}}"]
    return rf"\frac{{1}}{{{n}!}}", right, [rf"\frac{{1}}{{{n + 2}!}}", rf"\frac{{1}}{{{n - 1}!}}", f"{n}!"]


def root(draw: Draw) -> Made:
    k, n = draw.randint(2, 9), draw.choice([2, 3, 5, 6, 7, 10])
    right = [
        rf"\sqrt{{{k * k * n}}}",
        f"{k}√{n}",
        rf"\frac{{{k * n}}}{{\sqrt{{{n}}}}}",
        f"{k}sqrt({n})",
        f"{k * n**0.5:.9f}",
    ]
    return rf"{k}\sqrt{{{n}}}", right, [rf"{k + 1}\sqrt{{{n}}}", rf"\sqrt{{{k * n}}}", str(k * n), f"{k * n**0.5:.2f}"]


def interval(draw: Draw) -> Made:
    a = draw.randint(-20, 20)
    b = a + draw.randint(1, 20)
    right = [f"x \\in [{a}, {b})", f"{a} \\le x < {b}", f"[{a},{2 * b}/2)", f"{b} > x ≥ {a}", rf"\left[{a},{b}\right)"]
    return f"[{a},{b})", right, [f"({a},{b})", f"[{a},{b}]", f"[{a},{b + 1})", f"{a} < x < {b}", f"[{a - 1},{b})"]


def ray(draw: Draw) -> Made:
    a = draw.randint(-20, 20)
    right = [f"x < {a}", f"{a} > x", f"(-∞, {a})", f"2x < {2 * a}", rf"\left(-\infty,{a}\right)"]
    return rf"(-\infty, {a})", right, [f"x \\leq {a}", f"x > {a}", rf"(-\infty,{a}]", rf"({a}, \infty)", f"x < {a + 1}"]


def union(draw: Draw) -> Made:
    a = draw.randint(-20, 10)
    b = a + draw.randint(1, 9)
    right = [
        f"x<{a} or x>{b}",
        rf"({b}, \infty) \cup (-\infty, {a})",
        f"(-∞,{a})∪({b},∞)",
        f"x > {b} \\text{{ or }} x < {a}",
    ]
    wrong = [rf"(-\infty,{a}]\cup({b},\infty)", rf"(-\infty,{b})\cup({a},\infty)", rf"({a},{b})", rf"(-\infty,{a})"]
    return rf"(-\infty,{a})\cup({b},\infty)", right, wrong


def listing(draw: Draw) -> Made:
    items = draw.sample(range(-50, 50), k=draw.randint(2, 5))
    mixed_up = draw.sample(items, k=len(items))
    words = ", ".join(map(str, items[:-1])) + rf" \text{{ and }} {items[-1]}"
    right = [
        ", ".join(map(str, mixed_up)),
        words,
        rf"\{{{','.join(map(str, mixed_up))}\}}",
        f"x = {', '.join(map(str, items))}",
    ]
    wrong = [", ".join(map(str, items[:-1])), ", ".join(map(str, [*items[:-1], items[-1] + 100])), str(items[-1])]
    return ", ".join(map(str, items)), right, [*wrong, ", ".join(map(str, [*items, 77]))]


def plus_minus(draw: Draw) -> Made:
    a, b = draw.randint(1, 20), draw.choice([2, 3, 5, 7])
    right = [rf"{a}+\sqrt{{{b}}}, {a}-\sqrt{{{b}}}", f"{a} ± √{b}", rf"x = {a} \pm \sqrt{{{b}}}"]
    return rf"{a} \pm \sqrt{{{b}}}", right, [rf"{a}+\sqrt{{{b}}}", rf"{a + 1} \pm \sqrt{{{b}}}", str(a)]


def point(draw: Draw) -> Made:
    a, b = draw.sample(range(-30, 30), k=2)
    right = [
        rf"\left({a}, {b}\right)",
        f"(x, y) = ({a}, {b})",
        f"x={a}, y={b}",
        rf"\left(\frac{{{2 * a}}}{{2}}, {b}\right)",
    ]
    return f"({a}, {b})", right, [f"({b}, {a})", f"({a}, {b + 1})", f"[{a}, {b})", f"({a}, {b}, 0)", str(a)]


def matrix(draw: Draw) -> Made:
    a, b, c, d = draw.sample(range(-9, 9), k=4)
    rows = rf"{a} & {b} \\ {c} & {d}"
    right = [rf"\begin{{bmatrix}}{rows}\end{{bmatrix}}", rf"\left(\begin{{array}}{{cc}}{rows}\end{{array}}\right)"]
    half = rf"\begin{{pmatrix}}\frac{{{2 * a}}}{{2}} & {b} \\ {c} & {d}\end{{pmatrix}}"
    wrong = [rf"\begin{{pmatrix}}{a} & {c} \\ {b} & {d}\end{{pmatrix}}", rf"\begin{{pmatrix}}{a} & {b}\end{{pmatrix}}"]
    return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}", [*right, half], wrong


def polynomial(draw: Draw) -> Made:
    a, b = draw.sample(range(1, 12), k=2)
    right = [f"(x+{a})(x+{b})", f"x²+{a + b}x+{a * b}", f"x({a + b}+x)+{a * b}", f"(x+{b})(x+{a})"]
    return (
        f"x^2+{a + b}x+{a * b}",
        right,
        [f"(x+{a})(x-{b})", f"x^2+{a + b}x-{a * b}", f"{a + b}x+{a * b}", f"y^2+{a + b}y+{a * b}"],
    )


def function(draw: Draw) -> Made:
    k = draw.randint(2, 9)
    right = [
        rf"f(x) = \sin({k}x)+e^{{x}}",
        rf"e^x+\sin {k}x",
        rf"\sin({k}x)+\exp(x)",
        rf"\sin({k}x)+\mathrm{{e}}^{{x}}",
    ]
    return (
        rf"\sin({k}x)+e^x",
        right,
        [rf"\cos({k}x)+e^x", rf"\sin({k + 1}x)+e^x", rf"\sin({k}x)-e^x", rf"\sin({k})+e^x"],
    )


def equation(draw: Draw) -> Made:
    a, b, c = draw.randint(2, 9), draw.randint(2, 9), draw.randint(1, 30)
    right = [f"{b}y+{a}x={c}", f"{2 * a}x+{2 * b}y={2 * c}", f"{a}x+{b}y-{c}=0", f"{a}x = {c}-{b}y"]
    return f"{a}x+{b}y={c}", right, [str(c), f"{a}x-{b}y={c}", f"{a}x+{b}y={c + 1}", f"{a}x+{b}y", f"{b}x+{a + b}y={c}"]


def assignment(draw: Draw) -> Made:
    name, value = draw.choice(["x", "n", r"\theta", "a_1", "AB", "f(2)"]), draw.randint(2, 99)
    right = [f"{name} = {value}", f"{name}={value}.0", str(value), rf"{name} = \frac{{{2 * value}}}{{2}}"]
    return f"{name}={value}", right, [f"{name}={value + 1}", f"z={value}", str(value + 1), f"x^2+y^2={value}"]


def unit(draw: Draw) -> Made:
    n = draw.randint(2, 900)
    name = draw.choice(["cm", "km", "kg", "miles", "apples", "square units", "hours"])
    right = [f"{n} {name}", rf"{n}\text{{ {name}}}", str(n), rf"{n}~\mathrm{{{name}}}", rf"{n}\,\text{{{name}}}^2"]
    return rf"{n}\text{{ {name}}}", right, [f"{n + 1} {name}", rf"{n * 10}\text{{ {name}}}", name]


def in_one_font(draw: Draw) -> Made:
    n, name = draw.randint(2, 9_000), draw.choice(["cm", "apples", "square units", "US dollars"])
    right = [rf"\text{{{n:,} {name}}}", rf"\textbf{{{n} {name}}}", rf"\mathrm{{{n}\,{name}}}", f"{n} \U0001f389"]
    return str(n), right, [rf"\text{{{n + 1} {name}}}", rf"\text{{{n} and {n + 1}}}", rf"\text{{{n} or more}}"]


def scaled(draw: Draw) -> Made:
    n, (scale, zeros) = draw.randint(2, 99), draw.choice([("thousand", 3), ("million", 6), ("billion", 9)])
    right = [f"{n} {scale}", rf"{n}\text{{ {scale} dollars}}", rf"\text{{{n} {scale}}}", rf"\${n}.0 {scale}"]
    return str(n * 10**zeros), right, [str(n), f"{n} hundred", f"{n + 1} {scale}", f"{n} {scale}th"]


def other_number(draw: Draw) -> Made:
    n = draw.randint(2, 99)
    wrong = [f"{n} thirds", rf"{n}\text{{ hundredths}}", f"{n} squared", rf"{n}\text{{ degrees below zero}}"]
    return str(n), [f"{n} seconds", f"{n} quarters", f"{n} cm squared"], wrong


def money(draw: Draw) -> Made:
    n = draw.randint(1_000, 99_999)
    right = [rf"\${n:,}", f"${n}", f"{n}.00", f"{n} dollars", f"€{n}", rf"\${n}.00"]
    return rf"\${n}", right, [rf"\${n + 1}", rf"\${n}.01", f"{n / 100:.2f}"]


def percent(draw: Draw) -> Made:
    n = draw.randint(2, 99)
    right = [f"{n}%", rf"{n} \%", f"{n} percent", rf"\frac{{{n}}}{{100}}", f"0.{n:02}", str(n)]
    return rf"{n}\%", right, [rf"{n + 1}\%", rf"{n * 100}\%", f"0.{n + 1:03}", rf"{n}.5\%"]


def base(draw: Draw) -> Made:
    b, n = draw.choice([2, 3, 5, 7, 8]), draw.randint(30, 900)
    digits, value = "", n
    while value:
        digits, value = f"{value % b}{digits}", value // b
    right = [f"{digits}_{{{b}}}", rf"({digits})_{b}", rf"{digits}_{{({b})}}", rf"{digits} \text{{ (base {b})}}"]
    return f"{digits}_{b}", right, [digits, f"{digits}_{{{b + 1}}}", f"1{digits}_{b}", str(n + 1)]


def complex_number(draw: Draw) -> Made:
    a, b = draw.randint(1, 20), draw.randint(2, 20)
    right = [f"{b}i+{a}", rf"{a}+{b}\mathrm{{i}}", rf"z = {a} + {b}i", rf"{a}+i{b}", rf"\frac{{{2 * a}+{2 * b}i}}{{2}}"]
    return f"{a}+{b}i", right, [f"{a}-{b}i", str(a + b), f"{b}+{a + b}i", f"{a}+{b}", f"{a}"]


def euler(draw: Draw) -> Made:
    k, n = draw.randint(2, 9), draw.randint(2, 9)
    right = [rf"{k}\mathrm{{e}}^{{{n}}}", rf"{k} \cdot e^{n}", rf"{k}\exp({n})", rf"e^{{{n}}} \cdot {k}"]
    return f"{k}e^{{{n}}}", right, [f"{k}e{n}", f"{k}", rf"{k}e^{{{n + 1}}}", f"{k + 1}e^{{{n}}}"]


def angle(draw: Draw) -> Made:
    n = draw.randint(1, 179)
    right = [f"{n}°", rf"{n}^{{\circ}}", f"{n}", f"{n} degrees", rf"\angle ABC = {n}^\circ"]
    return rf"{n}^\circ", right, [f"{n + 1}°", rf"-{n}^\circ", f"{n}0"]


def multiple_of_pi(draw: Draw) -> Made:
    a, b = draw.randint(1, 20), draw.choice([3, 7, 9, 11])
    right = [
        f"{a}π/{b}",
        rf"\frac{{{a}}}{{{b}}}\pi",
        rf"\pi \cdot \frac{{{a}}}{{{b}}}",
        rf"\frac{{{2 * a}\pi}}{{{2 * b}}}",
    ]
    return (
        rf"\frac{{{a}\pi}}{{{b}}}",
        right,
        [rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{a + 1}\pi}}{{{b}}}", rf"\frac{{\pi}}{{{a + b}}}"],
    )


def repeating(draw: Draw) -> Made:
    n = draw.choice([n for n in range(1, 99) if n % 11])
    right = [rf"0.\overline{{{n:02}}}", rf"0.\bar{{{n:02}}}", f"{n}/99", rf"0.\dot{{{n // 10}}}\dot{{{n % 10}}}"]
    return (
        rf"\frac{{{n}}}{{99}}",
        right,
        [f"0.{n:02}", rf"0.\overline{{{(n + 1) % 100:02}}}", rf"0.0\overline{{{n:02}}}"],
    )


def product(draw: Draw) -> Made:
    a, b = draw.randint(2, 30), draw.randint(2, 30)
    right = [f"({a})({b})", f"{a}({b})", rf"{a} \cdot {b}", rf"{a} \times {b}", f"{a}*{b}", str(a * b)]
    wrong = [str(a * b + 1), f"({a})({b + 1})", f"{a}{b}", str(-a * b)]
    return str(a * b), right, [one for one in wrong if one != str(a * b)]


def ratio(draw: Draw) -> Made:
    a, b = draw.choice([(1, 2), (3, 4), (16, 9), (5, 7), (9, 20)])
    right = [f"{a} : {b}", f"{2 * a}:{2 * b}", rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}"]
    return f"{a}:{b}", right, [f"{b}:{a}", f"{a + 1}:{b}", f"{a}"]


def words(draw: Draw) -> Made:
    names = ["Tuesday", "east", "no solution", "Yes", "isosceles", "the second team", "never", "ellipse"]
    name, other = draw.sample(names, k=2)
    right = [rf"\text{{{name}}}", name.lower(), name.upper(), rf"\textbf{{{name}}}", f"{name}."]
    return name, right, [other, rf"\text{{{other}}}", "7"]


def labelled(draw: Draw) -> Made:
    letter, n = draw.choice("ABCDE"), draw.randint(2, 99)
    right = [
        rf"\textbf{{({letter})}}\ {n}",
        f"({letter}) {n}",
        str(n),
        rf"\mathrm{{({letter})}} \quad {n}",
        f"{letter}. {n}",
    ]
    return rf"\textbf{{({letter})}}\ {n}", right, [f"({letter}) {n + 1}", str(n + 1), rf"\textbf{{(F)}}\ {n}"]


def choice(draw: Draw) -> Made:
    letter, other = draw.sample("ABCDE", k=2)
    right = [letter, f"({letter})", rf"\text{{{letter}}}", rf"\textbf{{({letter})}}", f"{letter}: a polygenic trait"]
    wrong = [other, rf"\text{{{other}}}", f"{letter} or {other}", f"{letter}, {other}", "none"]
    return letter, [*right, f"{letter}. 12", letter.lower()], wrong


KINDS: tuple[Callable[[Draw], Made], ...] = (
    *(
        integer,
        decimal,
        fraction,
        mixed,
        scientific,
        power,
        inverse_power,
        factorial,
        root,
        interval,
        ray,
        union,
        listing,
    ),
    *(
        plus_minus,
        point,
        matrix,
        polynomial,
        function,
        equation,
        assignment,
        unit,
        in_one_font,
        scaled,
        other_number,
        money,
        percent,
        base,
        complex_number,
    ),
    *(euler, angle, multiple_of_pi, repeating, product, ratio, words, labelled, choice),
    *SPELLINGS,
)


def pairs(*, seed: int = SEED, per_kind: int = PER_KIND) -> Iterator[Pair]:
    """One right and one wrong answer to each reference, the next ones of its rewritings and neighbours in turn."""
    for kind in KINDS:
        draw = random.Random(f"{seed} {kind.__name__}")
        for index in range(per_kind):
            reference, right, wrong = kind(draw)
            yield Pair(kind.__name__, reference, right[index % len(right)], 1.0)
            yield Pair(kind.__name__, reference, wrong[index % len(wrong)], 0.0)


def graded(pair: Pair) -> float:
    """The verdict on a pair."""
    reward = multiple_choice if pair.kind == "choice" else math_answer
    is_whole = "\\boxed" in pair.given
    return reward(pair.given if is_whole else f"So it is $\\boxed{{{pair.given}}}$.", pair.reference)


def main() -> None:
    """Grades all pairs and prints the wrong verdicts, and their number."""
    start, found = time.perf_counter(), list(pairs())
    wrong = [pair for pair in found if graded(pair) != pair.right]
    for pair in wrong:
        print(f"{pair.kind}: {pair.given!r} for {pair.reference!r} should be {pair.right:g}")
    by_kind = dict(Counter(pair.kind for pair in wrong))
    print(f"{len(wrong)} wrong of {len(found)} in {time.perf_counter() - start:.0f} s {by_kind or ''}")


if __name__ == "__main__":
    main()
