"""Texts of tool calls of which one family has the kind."""

from tests.unit.conversations.call_writings import A, B, bad, says

UNQUOTED = (
    ("flag", "True", True),
    ("flag", "False", False),
    ("flag", "true", True),
    ("flag", "yes", "yes"),
    ("maybe", "None", None),
    ("maybe", "null", None),
    ("maybe", "12", 12),
    ("whole", "None", "None"),
    ("whole", " 3 ", 3),
    ("whole", "three", "three"),
    ("listed", "['a', True, None]", ["a", True, None]),
    ("listed", "('a', 'b')", "('a', 'b')"),
    ("object", "{'a': {1: (2, 3)}}", {"a": {"1": [2, 3]}}),
    ("object", "{'a', 'b'}", "{'a', 'b'}"),
    ("object", "{'a': 1", "{'a': 1"),
)
"""Argument, what is written, and its value by the tool's schema."""

F1, F2 = ("f", {"a": 1}), ("f", {"a": 2})

SINGLE = {
    "hermes": {
        "arguments first": says('<tool_call>{"arguments": {"text": "Delft"}, "name": "note"}</tool_call>', A),
        "two objects in a block": says(
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>',
            F1,
            F2,
        ),
        "a block in the place of a closing mark": says(
            '<tool_call>{"name": "f", "arguments": {"a": 1}}<tool_call>{"name": "f", "arguments": {"a": 2}}',
            *(F1, F2),
        ),
        "as OpenAI wraps it": says(
            '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>', F1
        ),
        "no marks at all": says('{"name": "f", "arguments": {"a": 1}}', F1),
        "a brace too many": bad('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>'),
        "a brace too few": bad('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
        "words in the block": bad('<tool_call>{"name": "f", "arguments": {"a": 1}} so</tool_call>'),
        "an empty block": bad("<tool_call></tool_call>"),
        "no name": bad('<tool_call>{"function": "f"}</tool_call>'),
        "no arguments": says('<tool_call>{"name": "f"}</tool_call>', ("f", {})),
        "a list": bad("<tool_call>[]</tool_call>"),
        "code": bad("<tool_call>f(a=1)</tool_call>"),
    },
    "qwen3_coder": {
        "two functions in a block": says(
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
            "<function=f>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
            *(F1, F2),
        ),
        "two functions and no block": says(
            "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
            "<function=f>\n<parameter=a>\n2\n</parameter>\n</function>",
            *(F1, F2),
        ),
        "in a line": says("<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", F1),
        "no inner closing mark": says("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>", F1),
        "words in the block": says("<tool_call><function=f><parameter=a>1</parameter></function> so </tool_call>", F1),
        "a value that is not closed": bad(
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
        ),
        "a value that is not closed, then another call": bad(
            "<tool_call>\n<function=set>\n<parameter=whole>\n3\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=set>\n<parameter=flag>\ntrue\n</parameter>\n</function>\n</tool_call>",
            ("set", {"flag": True}),
        ),
        "a value that is not closed, of a known tool": says(
            "<tool_call>\n<function=set>\n<parameter=whole>\n3\n<parameter=flag>\ntrue\n</parameter>\n</function>\n</tool_call>",
            B,
        ),
        "the last value is not closed": bad("<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        "values in lines are not closed": bad("<function=f><parameter=a>1<parameter=b>2</parameter></function>"),
        "words between values": bad("<function=f><parameter=a>1</parameter> and <parameter=b>2</parameter></function>"),
        "a block of JSON": bad('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'),
        "no name": bad("<tool_call>\n<function=>\n</function>\n</tool_call>"),
        "no end of the name": bad(
            "<tool_call>\n<function=f\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        ),
        "an empty block": bad("<tool_call></tool_call>"),
        "arguments without a function": bad("<parameter=a>\n1\n</parameter>"),
        **{
            f"{kind} for {text!r}": says(
                f"<tool_call>\n<function=set>\n<parameter={kind}>\n{text}\n</parameter>\n</function>\n</tool_call>",
                ("set", {kind: value}),
            )
            for kind, text, value in UNQUOTED
        },
    },
    "glm": {
        "in a line": says("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", F1),
        "a value that is not closed": bad(
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
        ),
        "a value that is not closed, then another call": bad(
            "<tool_call>set\n<arg_key>whole</arg_key>\n<arg_value>3\n</tool_call>\n"
            "<tool_call>set\n<arg_key>flag</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
            ("set", {"flag": True}),
        ),
        "a value that is not closed, of a known tool": says(
            "<tool_call>set\n<arg_key>whole</arg_key>\n<arg_value>3\n<arg_key>flag</arg_key>\n<arg_value>true</arg_value>\n"
            "</tool_call>",
            B,
        ),
        "a name that is not closed": bad("<tool_call>f\n<arg_key>a\n<arg_value>1</arg_value>\n</tool_call>"),
        "a name without a value": bad("<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>"),
        "a sentence in the block": bad("<tool_call>I will call f.</tool_call>"),
        "a block of JSON": bad('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'),
        "an empty block": bad("<tool_call></tool_call>"),
        **{
            f"{kind} for {text!r}": says(
                f"<tool_call>set\n<arg_key>{kind}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
                ("set", {kind: value}),
            )
            for kind, text, value in UNQUOTED
        },
    },
    "llama3": {
        "a tag": says('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', F1),
        "a tag and words": says('I look.\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', F1, content="I look."),
        "two tags": says(
            '<|python_tag|>{"name": "f", "parameters": {"a": 1}}<|python_tag|>{"name": "f", "parameters": {"a": 2}}',
            *(F1, F2),
        ),
        "the name of a tool": says('{"name": "list_all"}', ("list_all", {})),
        "another name": says(text := '{"name": "Delft"}', content=text),
        "arguments that are no object": bad('{"name": "note", "parameters": ["Delft"]}'),
        "code behind a tag": bad("<|python_tag|>print(1)"),
        "a list": says('[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {"a": 2}}]', F1, F2),
        "a line each": says('{"name": "f", "parameters": {"a": 1}}\n{"name": "f", "parameters": {"a": 2}}', F1, F2),
        "commas between": says('{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {"a": 2}}', F1, F2),
        "as OpenAI wraps it": says('{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', F1),
        "the word arguments": says('{"name": "f", "arguments": {"a": 1}}', F1),
        "its kind": says('{"type": "function", "name": "f", "parameters": {"a": 1}}', F1),
        "a fence": says('```json\n{"name": "f", "parameters": {"a": 1}}\n```', F1, content="```json\n\n```"),
        "words and a broken call": bad('Sure:\n{"name": "f", "parameters": {"a": 1'),
        "an answer, then a call": says(
            '{"answer": 7} {"name": "f", "parameters": {"a": 1}}', F1, content='{"answer": 7}'
        ),
        "a call in an answer": says(text := '{"call": {"name": "f", "parameters": {"a": 1}}}', content=text),
    },
    "mistral list": {
        "one object": says('[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', F1),
        "two objects": says(
            '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 2}}', F1, F2
        ),
        "two lists": says(
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}][TOOL_CALLS][{"name": "f", "arguments": {"a": 2}}]',
            F1,
            F2,
        ),
        "an empty list": bad("[TOOL_CALLS][]"),
        "a number in the list": bad('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, 2]', F1),
        "a list that does not end": bad('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}'),
    },
    "mistral [ARGS]": {
        "an id": says('[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"a": 1}', F1),
        "no mark before the arguments": says('[TOOL_CALLS]f{"a": 1}', F1),
        "no arguments": bad("[TOOL_CALLS]f[ARGS]"),
        "a name alone": bad("[TOOL_CALLS]f"),
    },
    "deepseek R1": {
        "no fence's end": says(
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}<｜tool▁call▁end｜>', F1
        ),
        "no fence": bad('<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{"a": 1}<｜tool▁call▁end｜>'),
        "no name": bad('<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'),
        "no outer marks": says(
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>', F1
        ),
    },
    "deepseek V3.1": {
        "a fence": says('<｜tool▁call▁begin｜>f<｜tool▁sep｜>```json\n{"a": 1}\n```<｜tool▁call▁end｜>', F1),
        "no separator": bad('<｜tool▁call▁begin｜>f{"a": 1}<｜tool▁call▁end｜>'),
        "no arguments": bad("<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>"),
        "outer marks alone": bad("<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        "words in the call": bad('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1} so<｜tool▁call▁end｜>'),
    },
    "gpt-oss": {
        "a recipient first": says(' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', F1),
        "thinking before": says(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f"
            '<|message|>{"a": 1}<|call|>',
            *(F1,),
            content="Hm.",
        ),
        "a preamble": says(
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f"
            '<|message|>{"a": 1}<|call|>',
            *(F1,),
            content="I look.",
        ),
        "no start of the next message": says(
            "<|channel|>commentary<|message|>I look.<|end|><|channel|>commentary to=functions.f"
            '<|message|>{"a": 1}<|call|>',
            *(F1,),
            content="I look.",
        ),
        "words behind the end": says("<|channel|>final<|message|>Yes.<|end|>No.", content="Yes.\nNo."),
        "a header that ends": bad("<|channel|>commentary to=functions.f <|constrain|>json"),
        "a header that is cut": bad("<|channel|>commentary to=functions.f <|constrain|>json", is_truncated=True),
        "a message, then a header": bad(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f", is_truncated=True
        ),
        "words in the arguments": bad('<|channel|>commentary to=functions.f<|message|>{"a": 1} so<|call|>'),
        "no arguments": says("<|channel|>commentary to=functions.list_all<|message|><|call|>", ("list_all", {})),
        "an answer": says("<|channel|>final<|message|>It is dry.", content="It is dry."),
    },
}
