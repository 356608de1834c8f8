"""Which part of a response is the program."""

import time

import pytest

from gtpo_megatron.rewards.program_block import program_in

CODE = "def f(x):\n    return x * x"
INDENTED = "   def f(x):\n       return x * x"
DRAFT = "def f(x): return 1"


def block(code=CODE, mark="python", fence="```", margin=""):
    return "\n".join(margin + line for line in [f"{fence}{mark}", *code.split("\n"), fence])


RIGHT = {
    "alone": block(),
    "with words": f"Let me think.\n{block()}\nDone.",
    "the last of several": f"{block(DRAFT)}\nbetter:\n{block(mark='py')}",
    "without a mark": block(mark=""),
    "without an end": f"```python\n{CODE}",
    "nothing around it": CODE,
    "only blanks around it": f"\n\n{CODE}\n  \n",
    "carriage returns": block().replace("\n", "\r\n"),
    "capitals and a version": block(mark="Python3.11"),
    "attributes": block(mark='python title="a.py" {1,3}'),
    "attributes of pandoc": block(mark="{.python .numberLines}"),
    "a space before the mark": block(mark=" python"),
    "tildes": block(fence="~~~"),
    "a longer fence": block(fence="`````"),
    "a longer end": f"```python\n{CODE}\n`````",
    "backquotes between tildes": f"~~~python\n{CODE}\n~~~\nUse ``` for code.",
    "in a list": f"1. Code:\n   ```python\n{INDENTED}\n   ```",
    "in a list of dashes": f"- Code:\n\n{block(margin='  ')}\n- done",
    "in a nested list": f"1. a\n   - b\n{block(margin='       ')}",
    "in a list, from its sign on": f"1. ```python\n{INDENTED}\n   ```",
    "indented by a tab": block(margin="\t"),
    "in a quotation": block(margin="> "),
    "begun inside a line": f"Here: ```python\n{CODE}\n```",
    "begun inside a line, no mark": f"Here it is: ```\n{CODE}\n```",
    "begun inside a bold line": f"**Answer** ```python\n{CODE}\n```",
    "ended inside a line": f"```python\n{CODE}```",
    "ended inside a line, with words after": f"```python\n{CODE} ```\nThat is `f`.",
    "code in the line of the fence": "```python def f(x):\n    return x * x\n```",
    "a block of Markdown": f"````markdown\nSolution:\n{block()}\n````",
    "a bare longer fence": f"````\n{block()}\n````",
    "never closed in thinking": f"<think>\n```python\n{DRAFT}\n</think>\n{block()}",
    "never closed in thinking, no marks": f"<think>\n```\n{DRAFT}\n</think>\n{block(mark='')}",
    "never closed, in a docstring": f'<think>\n```python\ndef f(x):\n    """Wait\n</think>\n{block()}',
    "never closed before": f"```python\n{DRAFT}\nNo, wait.\n\n{block()}",
    "two never closed": f"```python\n{DRAFT}\n```python\n{DRAFT}\n{block()}",
    "thinking without its begin": f"hm {block(DRAFT)}\n</think>\n{block()}",
    "only thought": f"<think>\n{block()}\n</think>\nThat was it.",
    "bare after thinking": f"<think>\n{block(DRAFT)}\n</think>\n{block(mark='')}",
    "its output after it": f"{block()}\nIt prints\n{block('4', mark='')}",
    "a shell command after it": f"{block()}\nRun it:\n{block('python a.py', mark='bash')}",
    "other languages before it": f"{block('{}', mark='json')}\n{block(mark='')}",
    "a tag behind the fence": f"<answer>```python\n{CODE}\n```</answer>",
    "a full stop behind the fence": f"{block()}.",
    "cut where another begins": f"{block()}\nor shorter:\n```python\n",
    "words between fences": f"text ```not a block``` text\n{block()}",
    "words between fences after it": f"{block()}\ntext ```not a block``` text",
}  # fmt: skip


@pytest.mark.parametrize("response", RIGHT.values(), ids=RIGHT)
def test_the_program_is_found(response):
    assert program_in(response) == CODE


DOCSTRINGS = {
    "bare": "def f(x):\n    '''\n    ```\n    f(2)\n    ```\n    '''\n    return x * x",
    "marked": 'def f(x):\n    """Squares.\n\n    ```python\n    f(2)\n    ```\n    """\n    return x * x',
    "at the margin": 'def f(x):\n    """\n```\nf(2)\n```\n    """\n    return x * x',
    "at the end of a line": 'def f(x):\n    """As in ```f(2)```\n    and ```\n    """\n    return x * x',
    "of a module": '"""Text.\n```\nf(2)\n```\n"""\ndef f(x): return x * x',
    "in a string": 'F = "```"\ndef f(x):\n    print("a", F)  # ```\n    return x * x',
    "quotes in strings": 'Q = \'"""\'\nR = "it\'s"\ndef f(x): return x * x',
    "an escaped quote": "Q = 'it\\'s'  # don't\ndef f(x): return x * x",
}


@pytest.mark.parametrize("code", DOCSTRINGS.values(), ids=DOCSTRINGS)
@pytest.mark.parametrize("margin", ["", "   "])
def test_a_fence_within_a_string_ends_nothing(code, margin):
    if not (margin and "\n```\n" in code):  # a line at the margin is not in the list
        assert program_in(f"Draft:\n{block(DRAFT)}\nAnswer:\n{block(code, margin=margin)}\nDone.") == code


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("", ""),
        ("   \n", ""),
        ("```python\n```", ""),
        ("```cpp\n```", ""),
        ("```python", ""),
        ("```python\n    return x\n```", "    return x"),  # completes a stub
        ("```text\na\n```\n```json\nb\n```", "b"),  # better than nothing
        ('```python\ns = """a\n```\nIt\'s done.', 's = """a'),  # a string that never ends
        ("I don't know.", "I don't know."),
    ],
)
def test_odd_responses(response, program):
    assert program_in(response) == program


def test_the_language_is_the_rows():
    both = f"{block('int main() {}', mark='cpp')}\n{block()}"
    assert program_in(both, "cpp") == "int main() {}"
    assert program_in(both) == CODE
    assert program_in(block("char c = '\"'; // don't\nint x;", mark="c++"), "cpp").endswith("int x;")


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["```", "```\n", "```python\n", "'''\n", '"', "~~~a ```b\n", "> ", "1. ", " ", "{."])
def test_a_long_response_takes_no_time(piece):
    start = time.process_time()
    program_in(piece * (200_000 // len(piece)))
    assert time.process_time() - start < 20.0  # a search that is quadratic takes minutes
