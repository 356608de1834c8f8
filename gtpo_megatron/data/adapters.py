"""The data sets known by name: their places on the hub, and the conversion of their records to rows."""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gtpo_megatron.config.problems import CODE_TEMPLATE, fill_template
from gtpo_megatron.data.hub import HubPlace
from gtpo_megatron.data.rows import (
    Record,
    Row,
    answer_text,
    generic_row,
    optional_text,
    other_columns,
    shown_or_missing,
    text_field,
)
from gtpo_megatron.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One known data set.

    Attributes:
        name: the name that users write, in lower case.
        hub: its place on the Hugging Face hub.
        to_row: ``(record, place, source)`` to a checked row; ``source`` is the name of the data set.
        num_problems: number of different problems of the pinned revision; a different number is reported. 0: nobody has
            counted them.
        is_kept: whether a row belongs to the set; the others are passed over.
    """

    name: str
    hub: HubPlace
    to_row: Callable[[Record, str, str], Row]
    num_problems: int
    is_kept: Callable[[Record], bool] = lambda _: True


def dapo_row(record: Record, place: str, source: str) -> Row:
    """DAPO-Math-17k (arXiv 2503.14476): ``prompt`` (messages), ``reward_model.ground_truth``, ``extra_info.index``.

    The published file has every prompt about a hundred times (1,791,700 rows); :class:`UniqueRows` drops repeats.
    """
    row = generic_row(record, place, source)
    extra = record.get("extra_info")
    if row.row_id is not None or not isinstance(extra, Mapping):
        return row
    return replace(row, row_id=optional_text(extra, "index"))


def question_reader(
    *questions: str, id_column: str = "", answer: Callable[[Record, str], str] | None = None
) -> Callable[[Record, str, str], Row]:
    """Reads benchmarks whose rows have a question and an answer in other columns.

    Args:
        questions: names of the question's column; the first one present is used.
        id_column: column of the id, which gets the data set's name as prefix; empty if there is none.
        answer: ``(record, place)`` to the reference answer; None reads the column ``answer``.
    """

    def to_row(record: Record, place: str, source: str) -> Row:
        row_id = optional_text(record, id_column)
        column = next((name for name in questions if record.get(name) is not None), questions[0])
        kept, extra = other_columns(record, without=column)
        reference, no_answer = "", ""
        try:
            reference = answer(record, place) if answer else answer_text(record.get("answer"), place, "answer")
        except DataError as error:
            no_answer = str(error)
        return Row(
            place=place,
            prompt=text_field(record, questions, place),
            answer=reference,
            no_answer=no_answer,
            row_id=None if row_id is None else f"{source}-{row_id}",
            source=source,
            is_bare=True,
            columns_json=kept,
            extra=extra,
        )

    return to_row


def olympiad_answer(record: Record, place: str) -> str:
    """Joins the parts of ``final_answer`` into one line without dollar signs, to be parsed as one expression."""
    final = record.get("final_answer")
    parts = [final] if isinstance(final, str) else final
    if not isinstance(parts, list | tuple) or not parts:
        raise DataError(f"{place}: final_answer is {shown_or_missing(final)}; expected a list of at least one text")
    return ", ".join(answer_text(part, place, "final_answer").replace("$", "").strip(" .") for part in parts)


LIVECODEBENCH_GRADER: dict[str, object] = {"comparison": "livecodebench", "time_limit": 6}
"""How its own grader compares outputs, and the seconds that it gives to a test."""


def humaneval_row(record: Record, place: str, source: str) -> Row:
    """HumanEval (arXiv 2107.03374): the beginning of a function, and a function ``check``."""
    stub, entry_point = text_field(record, ("prompt",), place), text_field(record, ("entry_point",), place)
    question = f"Complete the function `{entry_point}`:\n\n```python\n{stub}\n```"
    columns = {"test": record.get("test"), "entry_point": entry_point, "stub": str(record.get("prompt"))}
    return _code_row(question, columns, place, source, optional_text(record, "task_id"))


def mbpp_row(record: Record, place: str, source: str) -> Row:
    """MBPP (arXiv 2108.07732): a sentence and assertions, which the prompt shows, since they name the function."""
    tests = record.get("test_list")
    if not isinstance(tests, list) or not tests:
        raise DataError(f"{place}: test_list is missing or empty; expected a list of assertions")
    question = f"{text_field(record, ('text', 'prompt'), place)}\n\nIt must pass these tests:\n" + "\n".join(
        map(str, tests)
    )
    columns = {name: record.get(name) for name in ("test_list", "test_setup_code", "test_imports")}
    return _code_row(question, columns, place, source, optional_text(record, "task_id"))


def livecodebench_row(record: Record, place: str, source: str) -> Row:
    """LiveCodeBench (arXiv 2403.07974): public tests as JSON, private ones packed."""
    question = text_field(record, ("question_content",), place)
    kept = ("public_test_cases", "private_test_cases", "metadata", "starter_code")
    columns = {name: record.get(name) for name in kept} | LIVECODEBENCH_GRADER
    return _code_row(question, columns, place, source, optional_text(record, "question_id"))


def taco_row(record: Record, place: str, source: str) -> Row:
    """TACO (arXiv 2312.14852): ``input_output`` as JSON; its time limit is a text such as ``2.0 seconds``."""
    columns: dict[str, object] = {name: record.get(name) for name in ("input_output", "starter_code", "difficulty")}
    stated = re.match(r"\s*(\d+(?:\.\d+)?)", str(record.get("time_limit") or ""))
    if stated:
        columns["time_limit"] = float(stated[1])
    return _code_row(text_field(record, ("question",), place), columns, place, source, None)


def eurus_row(record: Record, place: str, source: str) -> Row:
    """Eurus-2-RL-Data (arXiv 2502.01456): chat messages; ``reward_model.ground_truth`` has the tests as JSON."""
    return generic_row(record, place, source)


def is_eurus_code(record: Record) -> bool:
    """Whether a row of Eurus-2-RL-Data is a programming problem; the others are mathematics."""
    return record.get("ability") == "code"


def _code_row(question: str, columns: Mapping[str, object], place: str, source: str, row_id: str | None) -> Row:
    """A row whose prompt asks for a program; a given beginning of the program is shown."""
    starter = columns.get("starter_code")
    if isinstance(starter, str) and starter.strip():
        question = f"{question}\n\nBegin with:\n```python\n{starter.rstrip()}\n```"
    if not (isinstance(starter, str) and starter.strip()) and not {"test", "test_list"} & columns.keys():
        question = f"{question}\n\nRead from standard input, and write to standard output."
    kept, extra = other_columns({name: value for name, value in columns.items() if value is not None}, without="")
    return Row(
        place=place,
        prompt=fill_template(CODE_TEMPLATE, question),
        answer="",
        row_id=None if row_id is None else f"{source}-{row_id.rpartition('/')[2]}",
        source=source,
        columns_json=kept,
        extra=extra,
        no_answer=f"{place}: {source} has tests in the place of answers; grade it with --reward.function "
        "gtpo_megatron.rewards.code_tests:code_tests",
    )


def svamp_row(record: Record, place: str, source: str) -> Row:
    """SVAMP (arXiv 2103.07191): a story in ``Body`` and what is asked in ``Question``; the answer is a number."""
    body, question = (text_field(record, (name,), place).strip() for name in ("Body", "Question"))
    joint = " " if body[-1] in ".?!" else ". "
    answer = record.get("Answer")
    # the published file has 51.0 for 51
    whole = int(answer) if isinstance(answer, float) and answer.is_integer() else answer
    flat = {"question": f"{body}{joint}{question}", "answer": whole, "id": None, "source": source}
    row = generic_row(flat | {name: record.get(name) for name in ("Equation", "Type")}, place, source)
    row_id = optional_text(record, "ID")
    return replace(row, row_id=None if row_id is None else f"{source}-{row_id}")


GSM8K = "e53f048856ff4f594e959d75785d2c2d37b678ee"
"""Commit of ``openai/gsm8k``."""

LIVECODEBENCH = "0fe84c3912ea0c4d4a78037083943e8f0c4dd505"
"""Commit of ``livecodebench/code_generation_lite``."""

_QUESTION = ("problem", "question")
"""Mirrors of a benchmark use either name."""

ADAPTERS = {
    adapter.name: adapter
    for adapter in (
        Adapter(
            name="dapo-math-17k",
            hub=HubPlace(
                repository="BytedTsinghua-SIA/DAPO-Math-17k",
                revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
                split="train",
            ),
            to_row=dapo_row,
            num_problems=17398,
        ),
        Adapter(  # arXiv 2110.14168; the answer ends with the number, after ####
            name="gsm8k",
            hub=HubPlace(repository="openai/gsm8k", revision=GSM8K, split="train", subset="main"),
            to_row=generic_row,
            num_problems=7473,
        ),
        Adapter(
            name="gsm8k-test",
            hub=HubPlace(repository="openai/gsm8k", revision=GSM8K, split="test", subset="main"),
            to_row=generic_row,
            num_problems=1319,
        ),
        Adapter(  # of the hub's copy nobody has looked up the commit here: the newest is taken, and written down
            name="svamp",
            hub=HubPlace(repository="ChilleD/SVAMP", revision="", split="test"),
            to_row=svamp_row,
            num_problems=0,
        ),
        Adapter(
            name="aime24",
            hub=HubPlace(
                repository="HuggingFaceH4/aime_2024", revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a", split="train"
            ),
            to_row=question_reader(*_QUESTION, id_column="id"),
            num_problems=30,
        ),
        Adapter(
            name="aime25",
            hub=HubPlace(
                repository="math-ai/aime25", revision="563bb8404243c5f09de6ec262f2db674fe5bce9b", split="test"
            ),
            to_row=question_reader(*_QUESTION, id_column="id"),
            num_problems=30,
        ),
        Adapter(
            name="math500",
            hub=HubPlace(
                repository="HuggingFaceH4/MATH-500", revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", split="test"
            ),
            to_row=question_reader(*_QUESTION, id_column="unique_id"),
            num_problems=500,
        ),
        Adapter(
            name="amc23",
            hub=HubPlace(repository="math-ai/amc23", revision="80815d37005feb82cd7f8fbc6901d5d3eff43057", split="test"),
            to_row=question_reader(*_QUESTION, id_column="id"),
            num_problems=40,
        ),
        Adapter(
            name="minerva",
            hub=HubPlace(
                repository="math-ai/minervamath", revision="ee46ddc498933b1977577953250ca5c66be64f96", split="test"
            ),
            to_row=question_reader(*_QUESTION),
            num_problems=272,
        ),
        Adapter(  # arXiv 2402.14008, the open-ended English text-only problems; ``unit`` and ``error`` are not used
            name="olympiadbench",
            hub=HubPlace(
                repository="Hothan/OlympiadBench",
                revision="91184b52131e7fc9455fef848035173aea8cc01a",
                split="train",
                subset="OE_TO_maths_en_COMP",
            ),
            to_row=question_reader("question", id_column="id", answer=olympiad_answer),
            num_problems=674,
        ),
        Adapter(
            name="humaneval",
            hub=HubPlace(
                repository="openai/openai_humaneval", revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544", split="test"
            ),
            to_row=humaneval_row,
            num_problems=164,
        ),
        Adapter(
            name="mbpp",
            hub=HubPlace(
                repository="google-research-datasets/mbpp",
                revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
                split="test",
                subset="full",
            ),
            to_row=mbpp_row,
            num_problems=500,
        ),
        Adapter(  # the repository has a script, which is not run: its files are read
            name="livecodebench",
            hub=HubPlace(
                repository="livecodebench/code_generation_lite",
                revision=LIVECODEBENCH,
                split="train",
                files=("test.jsonl", *(f"test{number}.jsonl" for number in range(2, 7))),
            ),
            to_row=livecodebench_row,
            num_problems=1055,
        ),
        Adapter(  # the problems that release 6 added, January to April 2025
            name="livecodebench-v6",
            hub=HubPlace(
                repository="livecodebench/code_generation_lite",
                revision=LIVECODEBENCH,
                split="train",
                files=("test6.jsonl",),
            ),
            to_row=livecodebench_row,
            num_problems=175,
        ),
        Adapter(
            name="taco",
            hub=HubPlace(
                repository="BAAI/TACO", revision="cfee71f82ec557cf792308d4b1dc72237743520b", split="train", subset="ALL"
            ),
            to_row=taco_row,
            num_problems=0,
        ),
        Adapter(
            name="eurus-2-code",
            hub=HubPlace(
                repository="PRIME-RL/Eurus-2-RL-Data",
                revision="5cbc5bc54c9c8417afd3539fb267422c33b525e6",
                split="train",
            ),
            to_row=eurus_row,
            num_problems=0,
            is_kept=is_eurus_code,
        ),
    )
}
"""Adapters by name."""


def adapter_of(name: str) -> Adapter:
    """The adapter of a known data set.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in ADAPTERS:
        close = difflib.get_close_matches(name, ADAPTERS, n=1)
        raise ConfigError(
            f"unknown data set {name!r}{f'; perhaps you meant {close[0]!r}' if close else ''}; known: "
            f"{', '.join(ADAPTERS)}, instructions, reasoning-gym:TASK; or give a file: {name}=FILE.jsonl"
        )
    return ADAPTERS[name]


def adapter_at(repository: str, subset: str) -> Adapter | None:
    """The known data set at a place of the hub; the first of several, and None if there is none.

    Args:
        repository: owner and name.
        subset: configuration; empty: any.
    """
    places = (one for one in ADAPTERS.values() if one.hub.repository == repository)
    return next((one for one in places if subset in ("", one.hub.subset)), None)
