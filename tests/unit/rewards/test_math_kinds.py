"""Kinds of answers that were graded wrongly, each with other values of its kind, in both directions."""

import pytest

from gtpo_megatron.rewards.math_answer import math_answer

# ruff: noqa: RUF001 - signs that people write
RIGHT = r"""
e-notation: 4.5 \times 10^{33} = 4.5e33 | 0.001 = 1e-3 | 3E8 = 3e8 | -\frac{1}{3} = -1./3 | 3e5 = 300000
e-notation: 6.02\cdot10^{23} = 6.02E+23
e-notation: 1.e-3 = 0.001 | 2.5e0 = 2.5 | -1.6e-19 = -1.6 \times 10^{-19} | 10^{-7} = 1e-7 | 4.5x10^33 = 4.5e33
e-notation: 1e3x = 1000x
Euler: 2e = 2\mathrm{e} | e^2 = \mathrm{e}^2 | \frac{1}{\operatorname{e}} = \frac1e | 2e - 5 = 2\mathrm{e}-5
Euler: 2e-5 = 2\mathrm{e}-5
Euler: 2e-5 = 2 \times 10^{-5} | 3e^{5} = 3\mathrm{e}^5
marks: \(58,500\) = 58,500 | \[20\text{ miles}\] = 20 | \(3 - i, -2 + i\) = 3-i, -2+i | $$5$$ = 5
marks: \left(\frac12\right) = 1/2
imaginary: 1-5i = 1-5\mathrm{i} | 1-5\text{i} = 1-5i | 2\mathbf{i} = 2i | (1+i)^2 = 2i | e^{i\pi} = -1
imaginary: \frac{1}{i} = -i
bases: 204_5 = 204_5 | 204_{5} = 204_5 | 1101_2 = 1101_{2} | 69 = 69_{10} | (204)_5 = 204_5
bases: 204_{\text{five}} = 204_5 | 1A_{16} = 1a_{16}
bases: 204 \text{ (base 5)} = 204_5 | 204 base 5 = 204_5 | 54_{10} = 54 | 13_{8} = 11
small: \frac{2}{2^{99}} = \frac{1}{2^{98}} | 1.60 \times 10^{-19} = 1.6e-19
small: \frac{2006\cdot2005}{2006!} = \frac{1}{2004!}
products: (3)(4) = 12 | 2(3) = 6 | (2)(3)(4) = 24 | (x+1)(x-1) = x^2-1 | 2(x+1) = 2x+2 | (-3)(4) = -12 | (3)4 = 12
products: 3(\frac12) = 1.5
unicode: 30° = 30^\circ | √2 = \sqrt{2} | ½ = \frac12 | (0, ∞) = (0,\infty) | x² = x^2 | 2½ = 5/2
unicode: √(x+1) = \sqrt{x+1} | 10⁻³ = 0.001
unicode: −3 = -3 | 2×3 = 6 | π/2 = \frac{\pi}{2} | x ≤ 2 = x \leq 2 | x ≥ 2 = x \ge 2 | ∅ = \emptyset
unicode: x₁+x₂ = x_1+x_2 | θ = \theta
unicode: ⅔ = 2/3 | 3√5 = 3\sqrt5 | 1–2 = -1 | ３ = 3 | 5 ± 2 = 5 \pm 2 | 12 345 = 12345 | (−∞, 2] = (-\infty,2]
unicode: ∛8 = 2 | x ≠ 2 = x \neq 2
thousands: 12\,345 = 12345 | 1\,234\,567 = 1234567 | 12{,}345 = 12345 | 12\ 345 = 12345 | 12,345.5 = 12345.5
thousands: 10,\!000 = 10000 | \$1,000 = 1000
notes: 9 = 9 (apples) | \frac12 = \frac{1}{2} (of the cake) | 9 (apples) = 9 | 3 \text{ (three)} = 3
notes: x+1 = x+1 (for x>0) | \ln x = \ln x \quad (x > 0) | n^2 = n^2 \text{ (for } n \ge 1) | 4 = 4 (where n=2)
fonts: 5x = 5\mathrm{x} | x+y = \mathrm{x}+\mathrm{y} | 5 = 5\,\mathrm{m}
equations: |AB|=5 = 5 | |S|=12 = 12 | \|\vec{a}\|=2 = 2
empty: \emptyset = \varnothing | \{\} = \emptyset | \varnothing = ∅
intervals: x \ge 2 = [2,\infty) | [2,\infty) = x \ge 2 | -1 < x \le 3 = (-1,3]
intervals: x<-1 \text{ or } x>1 = (-\infty,-1)\cup(1,\infty) | (2,\infty) = x>2
intervals: x \in [1,2) = [1,2) | 2x<10 = x<5 | \mathbb{R} = (-\infty,\infty) | [0,1)\cup(1,2] = [0,2]\setminus\{1\}
intervals: 3 \ge x = x \le 3
repeating: 0.\overline{3} = \frac13 | 0.1\overline{6} = 1/6 | 0.\dot{3} = 1/3 | 0.\overline{142857} = 1/7
repeating: 2.\bar{6} = 8/3 | 0.\dot{1}4285\dot{7} = 1/7
mixed: 1 1/2 = \frac32 | 2\frac13 = \frac73 | -1 1/2 = -\frac32 | -2\frac{1}{3} = -7/3 | 10 3/4 = 10.75
sentences: The number is 5. = 5 | The answers are 3 and 4 = 3, 4 | \text{The area is } 12\pi = 12\pi
labels: \textbf{(C)}\ 5 = 5 | (C) 5 = 5 | C. 5 = 5 | 5 = \textbf{(C)}\ 5 | C = \textbf{(C)}\ 5
labels: 7 = \textbf{(B) }7 | \text{(B)}7 = 7 | \textbf{(B) 7} = 7 | B = \textbf{(B) }7 | \text{B. }7 = 7
labels: \textbf{(D) }\frac12 = 0.5
labels: \textbf{(B)}\ \frac12 = 0.5 | \mathrm{(A)}\ 3 = 3
equations: x=5 = 5 | 5 = x=5 | f(x)=x+1 = x+1 | y=2x+1 = 2x-y+1=0 | 2x+4y=6 = x+2y=3
equations: \frac{x^2}{4}+\frac{y^2}{9}=1 = 9x^2+4y^2=36
equations: 2+3=5 = 5 | x^2+y^2=1 = y^2+x^2=1 | (x,y)=(1,2) = x=1, y=2 | \angle ABC=30^\circ = 30 | AB=5 = 5
equations: xy=1 = y=\frac1x
equations: \mathbf{y}=\begin{pmatrix}e^t\\e^{2t}\end{pmatrix} = \begin{bmatrix}e^{t}\\e^{2t}\end{bmatrix}
equations: \left|\begin{array}{rr}1&2\\3&4\end{array}\right|=-2 = -2
lists: n=2,3 = 2,3 | 3,2 = 2,3 | 2, 3, \text{ and } 5 = 2,3,5 | \pm 3 = 3,-3 | 1 \pm \sqrt2 = 1-\sqrt2, 1+\sqrt2
lists: \{1,2\} = 2,1
decimals: 0.333333 = 1/3 | 3.141593 = \pi | 1.500 = 1.5 | 2.0 = 2 | .5 = 0.5 | 1.41421356 = \sqrt2
decimals: 1.6180339887 = 1.618034
percent: 50\% = 0.5 | 50 = 50\% | 12.5\% = 12.5 | 12.5\% = \frac18 | 12.5 percent = 12.5\%
units: 5 cm = 5 | 5\text{ cm}^2 = 5 | 60 miles per hour = 60 | 5m = 5 | 10 cm^2 = 10\text{ cm}^2 | 3.2 m/s^2 = 3.2
units: 9 red apples = 9
words: No solution = \text{no solution} | Yes = yes | (B) = B | \text{Tuesday} = tuesday
braces: {\frac{1}{2}} = 0.5 | {{x+1}} = x+1 | -{\frac12} = -0.5 | {(1,2)} = (1,2) | (1,{\frac12}) = (1,0.5)
braces: {1}+{x} = x+1
braces: {\frac12}\text{ cm} = 0.5 | {5\choose 2} = 10 | {1\over 2} = 0.5 | \frac{{1}}{{2}} = 0.5 | {\textbf{(C)}}\ 5 = 5
braces: \begin{pmatrix}{1}\\{\frac12}\end{pmatrix} = \begin{pmatrix}1\\0.5\end{pmatrix} | {2}^{10} = 1024
braces: 12{:}30 = 12:30
thousands: 32,\! 349 = 32349 | 1,\! 234,\! 567 = 1234567 | 32{,} 349 = 32349
blanks: \ 185\;\ . = 185 | 185\\ = 185
indices: T_\text{max} = T_{\text{max}} | T_{max} = T_\mathrm{max} | T_\max = T_{\text{max}}
indices: 1+R_\odot^2 = R_{\odot}^2+1
indices: 2k_{\mathrm{B}}T = 2k_BT | 1+E_{kin} = E_\text{kin}+1 | \theta_{\rm c} = \theta_c | \log_\text{2} 8 = 3
indices: I_0 = I_{\text{0}}
bases: \text{AB}_{16} = AB_{16} | 2\text{A}_{16} = 2A_{16}
units: 9.8\ \mathrm{m/s^2} = 9.8 | 9.8\,\mathrm{m\,s^{-2}} = 9.8 | 9.8\,\frac{\text{m}}{\text{s}^2} = 9.8
units: 9.8\ \mathrm{\frac{m}{s^2}} = 9.8 | 9.8 \text{ m}\cdot\text{s}^{-2} = 9.8 | 5\ \mu\mathrm{m} = 5
units: \mathrm{9.8\ m/s^2} = 9.8
units: 5\,{\rm cm} = 5 | \text{Rs. } 500 = 500 | \text{US\$} 500 = 500
fonts: \mathbf{x^2+1} = x^2+1 | \mathbf{2x} = 2x | \mathrm{\frac12} = 0.5
approximations: \sqrt2 \approx 1.41 = \sqrt2 | \sqrt2 = \sqrt2 \approx 1.41 | x=\sqrt2 \simeq 1.414 = \sqrt2
approximations: \sqrt2\ (\approx 1.414) = \sqrt2 | \Delta p \approx -3 = -3 | \sim 5 = 5
approximations: \frac13 \approx 33.3\% = \frac13
approximations: e^{10} \approx 2.2\times 10^4 = e^{10}
lists: \text{A, B, and C} = A, B, C | A, C = \text{A and C} | A, B, & C = A, B, C | A \& C = C, A
lists: 18\text{ and 19} = 18, 19
lists: i, 1 = 1, i | \{1,-i,i\} = 1, i, -i
integers: n\pi, n \in \mathbb{Z} = n\pi | n\pi = n\pi, n \in \mathbb{Z} | k\pi\ (k\in\mathbb{Z}) = n\pi, n\in\mathbb{Z}
integers: 2n \text{ for any integer } n = 2n | 2n \text{ where } n \text{ is an integer} = 2k, k \in \mathbb{Z}
times: 12:30 \text{ PM} = 12:30 p.m. | 14:30 = 2:30 PM | \text{5 p.m.} = 5:00 PM | 12:05 a.m. = 0:05
degrees: 60^\circ = \frac{\pi}{3} | \frac{\pi}{3} = 60^\circ | 60 \text{ degrees} = \pi/3
logarithms: \lg 100 = 2 | \lg 5 = \log_{10} 5
"""
WRONG = r"""
braces: {\frac{1}{3}} = 0.5 | {x+1}^2 = x+1 | {1}{2} = 1 | {(2,1)} = (1,2) | 2{x+1} = x+1 | {\frac12}^2 = 0.5
thousands: 32,\! 34 = 3234 | (32,\! 349) = 32349 | 32, 349 = 32349
blanks: 185\ 0 = 185
indices: T_{\text{min}} = T_{\text{max}} | T_\max = T | R_\oplus^2 = R_\odot^2 | k_A = k_B | 2I_1 = 2I_0 | I_0 = i
bases: \text{AC}_{16} = AB_{16} | \text{AB} = AB_{16}
units: 5\mathrm{x^2} = 5 | 5\frac{x}{y} = 5 | 5\cdot\frac{\text{m}}{3} = 5 | 5\text{ to 6} = 5 | 5\text{ ft 6 in} = 5
units: 5\text{ or more} = 5 | 9.8^2\ \mathrm{m/s^2} = 9.8 | \frac{5\,\mathrm{m}}{2\,\mathrm{s}} = 5 | 2\mathrm{\pi} = 2
approximations: \sqrt2 \approx 1.51 = \sqrt2 | \frac13 \approx 0.3 = 0.3 | \pi \approx 3 = 3
approximations: \sqrt2+1 \approx 1.414 = \sqrt2
approximations: 4 \approx \pi = \pi | 3=\pi = \pi | 0.577 = \frac{\sqrt3}{3} \approx 0.577 | 2.5 \approx 3 = 3
approximations: 2\pi \approx 6.28 = \sqrt2 \approx 1.414 | \triangle ABC \sim \triangle DEF = \triangle DEF
lists: \text{A, B, and D} = A, B, C | \text{A and B} = A, B, C | \text{18 and 19} = 18 | 18\text{ and 19} = 18
lists: 1, 2i = 1, i | 1, 2 = 1, i | \frac10, 3 = 2, 3 | 2, \log 0 = 2, 3 | [1,2i] = \{1,i\} | 1, 2 = [1,2)
lists: \infty, i = 1, i | \{1\}\cup\{2i\} = \{1,i\} | \pm i = \pm 1 | (\frac00, 3] = [2,3] | x<i = x<3
integers: n\pi, n \in \mathbb{N} = n\pi, n \in \mathbb{Z} | 2n, n \in \mathbb{N} = 2n | k\pi = n\pi, n \in \mathbb{Z}
integers: n \in \mathbb{Z} = n\pi, n \in \mathbb{Z} | x>2 = x>2, x \in \mathbb{Z}
integers: 2n, k \in \mathbb{Z} = 2k, k \in \mathbb{Z}
times: 12:30 a.m. = 12:30 p.m. | 5\text{ a.m.} = 5\text{ p.m.} | 14:30 = 2:30 AM | 12:31 PM = 12:30 PM
degrees: 60 = \frac{\pi}{3} | 30^\circ = \frac{\pi}{3} | 60^\circ = \frac{\pi}{6} | 60^\circ = \frac13
logarithms: \lg 10 = 2 | \ln 100 = 2
equations: 1=2 = 3=4 | 2x=3 = 2x=\begin{pmatrix}1\\2\end{pmatrix} | 5=5.2 = 1=1.04
e-notation: 4.5 \times 10^{32} = 4.5e33 | 0.01 = 1e-3 | 3E7 = 3e8 | 45 = 4.5e1x | 3e5 = 3 | 3 = 3e5 | 1e-3 = 1e3
Euler: 2 = 2\mathrm{e} | 2e = 20 | 2e^5 = 200000 | 2e - 5 = 2e-4
imaginary: -4 = 1-5\mathrm{i} | 1 = 1-5\mathrm{i} | 1+5i = 1-5i | 5i = 5
bases: 204_6 = 204_5 | 204 = 204_5 | 54 = 204_5 | 110110_2 = 204_5 | 209_5 = 204_5 | 205_5 = 204_5 | 1101_2 = 1101
small: 0.0000003 = 0.00000025 | 1.7 \times 10^{-19} = 1.6 \times 10^{-19} | \frac{1}{2^{99}} = \frac{1}{2^{98}}
small: \frac{1}{2004!} = \frac{1}{2006!}
small: 1e-30 = 0 | 0 = \frac{1}{2^{99}} | e^{-200} = 0 | 1.0000001 = 1 | 123456.7 = 123456.8
small: 10^{-20}x = 2\cdot10^{-20}x
equations: x^2+y^2=1 = 1 | x^2-4x-2=0 = 0 | 1 = x^2+y^2=1 | xy=6 = 6 | x=5 = y=5 | 2x+3y=6 = 2x+3y=7 | 2+3=6 = 6
equations: x+y=5 = 5
equations: \left|\begin{array}{rr}1&2\\3&4\end{array}\right|=7 = \left|\begin{array}{rr}1&2\\3&4\end{array}\right|=-2
equations: y=x^2 = y=x^3
equations: \mathbf{y}=\begin{pmatrix}e^t\\e^{2t}\end{pmatrix} = \mathbf{y}=\begin{pmatrix}e^t\\e^{3t}\end{pmatrix}
equations: f(x)=x = f(x)=2x
products: (3)(4) = 7 | 2(3) = 5 | (3)(4) = 34
lists: n=2,3,4 = n=1,2,3 | (0,1) = (0,1.5) | \pm 2021 = 2021 | 2021 = \pm 2021 | 12:00 = 1:00
lists: 19,46,\text{ and }82 = 21,36, and 82
lists: 1-1/e = 1+1/e | 5 or 6 = 5 | 5 = 5 or 6 | (1,2) = (2,1) | [1,2) = (1,2] | 2:30 PM = 2:30 AM
units: 3t = 3 | x' = x | 5x = 5 | 3\text{ cm} = 5\text{ cm}
thousands: 12\,345 = 12 | 12,34 = 1234
repeating: 0.\overline{3} = 0.3 | 0.\overline{3} = 0.33 | 0.1\overline{6} = 0.16
mixed: 1 1/2 = 11/2 | 1 1/2 = 1/2 | 2\frac13 = \frac23
intervals: x \ge 2 = (2,\infty) | x > 2 = [2,\infty) | x<2 = x>2 | y>2 = x>2 | (1,2]\cup(3,4) = (1,2)\cup(3,4)
labels: 8 = \textbf{(B) }7 | \textbf{(A) }7 = \textbf{(B) }7
notes: x+2 = x+1 (for x>0) | P (X=1) = P (X=2) | 1 (x>0), -1 (x<0) = 1 (x>0), -1 (x<5) | 3 (x+1) = 3
fonts: 5 = 5\mathrm{x} | 5 = 5\text{n}
equations: |x|=12 = 12
labels: \textbf{(C)}\ 5 = \textbf{(B)}\ 5 | (C) 5 = 6 | C = \textbf{(B)}\ 5 | (A) 5 = B
decimals: 0.3333 = 1/3 | 0.33 = \frac13 | 3.14 = \pi | 2.9999999 = 3 | 0.33333 = \frac13
percent: 50\% = 5\% | 0.5\% = 0.5 | 100\% = 1\% | 5000\% = 50\%
words: \text{west} = \text{east} | seat = east | No = yes | \text{stew} = \text{west}
variables: Rr = r^2 | x+1 = x+2 | \sqrt{x^2} = x | x^2 = x^3 | \sin x = \cos x | a+b = a-b | 2^n = n^2
"""


def pairs(table):
    """Given answer and reference; " = " with spaces stands between the two."""
    lines = [line.partition(": ") for line in table.strip().splitlines()]
    found = [pair.strip().partition(" = ") for _, _, rest in lines for pair in rest.split(" | ")]
    return [(given, right) for given, _, right in found]


def rewards(table):
    """Of an answer in a box, by the answer and its reference."""
    return {(given, right): math_answer(f"So it is \\boxed{{{given}}}.", right) for given, right in pairs(table)}


@pytest.mark.slow
def test_the_same_in_another_spelling_is_right():
    found = rewards(RIGHT)
    assert len(found) > 200
    assert [pair for pair, reward in found.items() if reward != 1.0] == []


BOXES = [
    r"$\boxed{20}$; $\boxed{30}$",
    r"\boxed{20} \text{ and } \boxed{30}",
    r"\[\boxed{20} \quad \text{or} \quad \boxed{30}\]",
    r"\[\boxed{20}\] and \[\boxed{30}\]",
    r"\begin{align*} x &= \boxed{20} \\ y &= \boxed{30} \end{align*}",
    r"$x = \boxed{20}$ or $x = \boxed{30}$",
]


@pytest.mark.parametrize("boxes", BOXES)
def test_boxes_that_are_joined_are_one_answer_in_a_response_and_in_a_reference(boxes):
    assert math_answer(boxes, "30, 20") == 1.0
    assert math_answer(boxes, "30") == math_answer(boxes, "20") == math_answer(boxes, "20, 31") == 0.0
    assert math_answer(r"\boxed{30, 20}", boxes) == math_answer(boxes, boxes) == 1.0
    assert math_answer(r"\boxed{30}", boxes) == math_answer(r"\boxed{20}", boxes) == 0.0


def test_a_name_belongs_to_its_box():
    assert math_answer(r"$y = \boxed{2}$, $x = \boxed{1}$", "x=1, y=2") == 1.0
    assert math_answer(r"$y = \boxed{1}$, $x = \boxed{2}$", "x=1, y=2") == 0.0


def test_a_reference_that_begins_with_a_box_has_no_other_answer():
    assert math_answer(r"\boxed{20, 30}", r"\boxed{20} boys and \boxed{30} girls") == 1.0
    assert math_answer(r"\boxed{30}", r"\boxed{20} boys and \boxed{30} girls") == 0.0
    assert math_answer(r"\boxed{7}", r"First \boxed{2}. So the answer is \boxed{7}.") == 1.0


@pytest.mark.parametrize("given", ["10^{{10^{10}}}", "{10}^{{10}^{{10}}}", r"10^{\mathrm{10^{10}}}"])
def test_a_power_that_braces_hide_is_not_computed(given):
    assert math_answer(rf"\boxed{{{given}}}", "5") == 0.0


@pytest.mark.slow
def test_a_neighbour_is_wrong():
    found = rewards(WRONG)
    assert len(found) > 150
    assert [pair for pair, reward in found.items() if reward != 0.0] == []
