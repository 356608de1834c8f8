r"""Kinds of pairs for :mod:`tests.unit.rewards.answer_pairs`: how answers are boxed, grouped, indexed, and what stands
beside them.
"""

import random

Draw = random.Random
Made = tuple[str, list[str], list[str]]
"""A reference, what is right for it, and what is wrong; what has a box of its own is a whole response."""

JOINTS = [
    *(", ", "; ", r",\ ", r"\ ,\ ", r"\qquad ", r"\text{ or }", r"\mathrm{and}", r" \quad \text{or} \quad ", r"\,,\;"),
    *("$ and $", r"\) and \(", r"\] or \[", "$$ and $$", r"\ \&\ ", r" \land ", r"~\textbf{and}~", r", \text{ and }"),
]


def _boxes(draw: Draw, a: object, b: object) -> str:
    joint = draw.choice(JOINTS).replace(r"\qquad ", r"\qquad,\qquad ")
    left, right = {"$$": ("$$", "$$"), r"\)": (r"\(", r"\)"), r"\]": (r"\[", r"\]"), "$ ": ("$", "$")}.get(
        joint[:2], draw.choice([("$", "$"), (r"\[", r"\]"), ("", "")])
    )
    return rf"{left}\boxed{{{a}}}{joint}\boxed{{{b}}}{right}"


def several_boxes(draw: Draw) -> Made:
    a, b, c = draw.sample(range(-50, 100), k=3)
    lines = rf"\begin{{align*}} x &= \boxed{{{a}}} \\ y &= \boxed{{{b}}} \end{{align*}}"
    wrong = [_boxes(draw, a, c), rf"\boxed{{{b}}}", rf"${_boxes(draw, a, b)}$, \boxed{{{c}}}", _boxes(draw, c, b)]
    return f"{a}, {b}", [_boxes(draw, a, b), _boxes(draw, b, a), lines], wrong


def boxed_reference(draw: Draw) -> Made:
    a, b = draw.sample(range(-50, 100), k=2)
    reference = draw.choice([_boxes(draw, a, b), rf"$x=\boxed{{{a}}}$ or $x=\boxed{{{b}}}$"])
    return reference, [f"{b}, {a}", rf"{a} \text{{ and }} {b}", _boxes(draw, a, b)], [str(b), str(a), f"{a}, {b + 100}"]


def grouped(draw: Draw) -> Made:
    a, b = draw.randint(2, 9), draw.choice([11, 13, 17])
    whole, other = draw.choice(
        [
            (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{b}}}{{{a}}}"),
            (rf"-\sqrt{{{b}}}", rf"\sqrt{{{b + 2}}}"),
            (f"x+{a}", f"x-{a}"),
            (f"({a},{b})", f"({b},{a})"),
            (f"{a}.{b}", f"{b}.{a}"),
            (rf"{a}\pi", rf"{b}\pi"),
        ]
    )
    right = [f"{{{whole}}}", f"{{{{{whole}}}}}", f"{{ {whole} }}", rf"{{{whole}}}\text{{ cm}}", f"x = {{{whole}}}"]
    return whole, right, [f"{{{other}}}", f"{{{whole}}}^2", f"-{{{other}}}", f"{{{whole}}}, {{{other}}}"]


def split_thousands(draw: Draw) -> Made:
    a, b = draw.randint(1, 999), draw.randint(100, 999)
    right = [rf"{a},\! {b}", rf"{a},\!{b}", rf"{a}{{,}} {b}", rf"{a},\!\,{b}", rf"\${a},\! {b}"]
    return f"{a}{b}", right, [rf"{a},\! {b + 1}", rf"{a},\! {b}0", f"{a}, {b}", rf"({a},\! {b})"]


def blank_behind(draw: Draw) -> Made:
    n = draw.randint(-99, 999)
    return (
        str(n),
        [rf"{n}\ ", rf"{n}\\", rf"\ {n}\ \ ", rf"{n}\quad", rf"{n}\;."],
        [rf"{n + 1}\ ", rf"{n}\ 1", rf"{n}0\\"],
    )


def index(draw: Draw) -> Made:
    base = draw.choice(["T", "E", "I", r"\lambda", r"\omega", "v", "F", r"\Phi"])
    name, other = draw.sample(["max", "net", "min", "B", "out", "friction", "kin"], k=2)
    spelled = [
        *(
            rf"{base}_{{\text{{{name}}}}}",
            rf"{base}_\text{{{name}}}",
            rf"{base}_{{{name}}}",
            rf"{base}_\mathrm{{{name}}}",
        ),
        *(rf"{base}_{{\rm {name}}}", rf"{base}_{{\operatorname{{{name}}}}}", rf"1 \cdot {base}_\textrm{{{name}}}"),
    ]
    wrong = [rf"{base}_{{\text{{{other}}}}}", base, rf"{base}_{{{name}}}^2", rf"{base}_0", rf"2{base}_\text{{{name}}}"]
    return draw.choice(spelled[:4]), spelled, wrong


def unit_of_units(draw: Draw) -> Made:
    n = draw.choice([str(draw.randint(2, 900)), f"{draw.randint(2, 9)}.5", r"\frac{3}{7}", r"2\pi"])
    name = draw.choice(
        ["m/s^2", "m/s^{2}", r"kg\cdot m/s", r"W/(m\cdot K)", r"m\,s^{-1}", r"J\,mol^{-1}\,K^{-1}", r"\frac{m}{s}"]
    )
    right = [
        *(rf"{n}\ \mathrm{{{name}}}", rf"{n}\,\operatorname{{{name}}}", rf"x = {n}~\mathrm{{{name}}}"),
        *(rf"{n}\,\frac{{\text{{m}}}}{{\text{{s}}^2}}", rf"{n}\ \text{{kg}}\cdot\text{{m}}/\text{{s}}^2", n),
    ]
    wrong = [rf"3{n}\ \mathrm{{{name}}}", rf"-{n}\ \mathrm{{{name}}}", rf"{n}\ \mathrm{{x^2}}", rf"{n}\frac{{a}}{{b}}"]
    return draw.choice([n, right[0]]), right, [*wrong, rf"{n}\text{{ to 9}}", rf"{n}\cdot\frac{{\text{{m}}}}{{3}}"]


def approximation(draw: Draw) -> Made:
    n = draw.choice([2, 3, 5, 6, 7, 10, 11])
    root, places = rf"\sqrt{{{n}}}", draw.randint(1, 4)
    about, off = f"{n**0.5:.{places}f}", f"{n**0.5 + 2 * 10**-places:.{places}f}"
    sign = draw.choice([r"\approx", r"\simeq", r"\doteq", "\u2248"])
    right = [
        *(f"{root} {sign} {about}", root, f"x = {root} {sign} {about}", f"{about} {sign} {root}"),
        rf"{root}\text{{ cm}} {sign} {about}\text{{ cm}}",
    ]
    wrong = [f"{root} {sign} {off}", f"{root}+1 {sign} {about}", off, f"{off} {sign} {root}", f"{off} {sign} {about}"]
    return draw.choice([root, f"{root} {sign} {about}"]), right, wrong


def list_in_text(draw: Draw) -> Made:
    a, b, c, d = (
        draw.sample([*"ABCDEFGH"], k=4) if draw.random() < 0.5 else draw.sample(["Ann", "Bob", "Cy", "Dora"], k=4)
    )
    right = [
        *(
            rf"\text{{{a}, {b}, and {c}}}",
            rf"\text{{{c}, {a} and {b}}}",
            rf"\text{{{a}}}, \text{{{b}}}, \text{{and {c}}}",
        ),
        *(rf"{a}, {b}, \text{{ and }} {c}", rf"\textbf{{{a}, {b}, {c}}}", rf"{a}, {b} \& {c}", f"{a}, {b}, & {c}"),
    ]
    wrong = [rf"\text{{{a}, {b}, and {d}}}", rf"\text{{{a} and {b}}}", rf"\text{{{a}, {b}, {c}, and {d}}}", a]
    return draw.choice([f"{a}, {b}, {c}", right[0]]), right, wrong


def for_integers(draw: Draw) -> Made:
    a, (one, two) = draw.randint(2, 9), draw.sample("kmn", k=2)
    of = rf"\frac{{\pi}}{{{a}}}+{{}}"
    right = [
        *(rf"{of}{one}\pi, {one} \in \mathbb{{Z}}", rf"{of}{two}\pi \quad ({two} \in \mathbb{{Z}})"),
        *(rf"x = {of}{one}\pi,\ {one}\in\mathbf{{Z}}", rf"{of}{one}\pi \text{{ where }} {one} \in \mathbb{{Z}}"),
        rf"{of}{two}\pi \text{{ for any integer }} {two}",
    ]
    wrong = [
        *(rf"{of}2{one}\pi, {one} \in \mathbb{{Z}}", rf"{of}{one}\pi, {one} \in \mathbb{{N}}"),
        *(rf"{one}\pi, {one} \in \mathbb{{Z}}", rf"{one} \in \mathbb{{Z}}", rf"{of}{two}\pi, {one} \in \mathbb{{Z}}"),
    ]
    return draw.choice(right[:1] + right[3:4]), [*right, rf"{of}{one}\pi"], wrong


def time_of_day(draw: Draw) -> Made:
    hour, minute = draw.randint(1, 11), draw.randint(0, 59)
    at = f"{hour}:{minute:02}"
    right = [
        *(
            rf"{at} \text{{ PM}}",
            f"{at} p.m.",
            rf"{at}\,\mathrm{{pm}}",
            rf"\text{{{at} P.M.}}",
            f"{hour + 12}:{minute:02}",
        ),
        at,
    ]
    wrong = [
        *(rf"{at} \text{{ AM}}", f"{at} a.m.", f"{hour}:{(minute + 1) % 60:02} PM", f"{hour % 11 + 1}:{minute:02} PM"),
        f"{(hour + 5) % 12 + 12}:{minute:02}",
    ]
    return draw.choice([f"{at} PM", rf"{at}\text{{ p.m.}}"]), right, wrong


def radians(draw: Draw) -> Made:
    a, b = draw.randint(1, 11), draw.choice([2, 3, 4, 5, 6, 9, 12])
    n = a * 180 // b
    reference, degrees = (
        rf"\frac{{{a}\pi}}{{{b}}}",
        [rf"{n}^\circ", rf"{n}^{{\circ}}", rf"{n}\text{{ degrees}}", f"{n}°"],
    )
    wrong = [rf"{n + 1}^\circ", str(n), rf"-{n}^\circ", rf"\frac{{{n}}}{{\pi}}"]
    return reference, [*degrees, rf"\theta = {n}^\circ"], wrong


def complex_list(draw: Draw) -> Made:
    a, b, c = draw.sample(range(2, 30), k=3)
    right = [f"{b}i, {a}", rf"\{{{a}, {b}i\}}", rf"{a} \text{{ and }} {b}i", f"{a}, i{b}"]
    wrong = [
        f"{a}, {c}i",
        f"{a}, {b}",
        rf"{a}, -{b}i",
        rf"{a}, \frac{{1}}{{0}}",
        rf"\infty, {b}i",
        f"{a}",
        f"[{a}, {b}i]",
    ]
    return f"{a}, {b}i", right, [*wrong, rf"\{{{a}\}} \cup \{{{c}i\}}"]


def currency(draw: Draw) -> Made:
    n = draw.randint(2, 9_000)
    right = [
        rf"\text{{Rs. }} {n}",
        f"Rs. {n}",
        rf"\text{{USD }}{n}",
        rf"\text{{Rs. {n}}}",
        rf"\text{{US\$}} {n}.00",
        f"₹{n}",
    ]
    return draw.choice([str(n), right[0]]), right, [rf"\text{{Rs. }} {n + 1}", rf"\text{{Rs. }} {n}0", f"Rs. -{n}"]


def decimal_logarithm(draw: Draw) -> Made:
    n, k = draw.choice([2, 3, 5, 7]), draw.randint(2, 9)
    right = [
        rf"{k}\lg {n}",
        rf"\lg {n}^{k}",
        rf"{k}\log_{{10}} {n}",
        rf"\frac{{{k}\ln {n}}}{{\ln 10}}",
        rf"{k}\lg({n})",
    ]
    return draw.choice(right[:3]), right, [rf"{k}\ln {n}", rf"{k}\lg {n + 1}", rf"{k}\log_2 {n + 8}", rf"\lg {n}"]


SPELLINGS = (
    *(several_boxes, boxed_reference, grouped, split_thousands, blank_behind, index, unit_of_units, approximation),
    *(list_in_text, for_integers, time_of_day, radians, complex_list, currency, decimal_logarithm),
)
