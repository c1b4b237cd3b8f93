"""Row formats of other tools, from files of each kind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from logitless.models import tokenizer
from logitless.models.chat.template import ChatTemplate
from logitless.models.tokenizer import Tokenizer
from logitless.training.config import TrainingConfig
from logitless.training.data.arrangement import arranged, context_for
from logitless.training.data.dataset_rows import DatasetRow, RowAnswer
from logitless.training.data.formats import parse_row
from logitless.training.data.load import Reader
from logitless.training.data.prompts import prompts_of
from logitless.training.data.sources import is_rows, rows_of
from logitless.training.errors import TrainingError
from logitless.training.methods.registry import objective
from logitless.training.scratch import byte_vocabulary

USER, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}
BAD = {"role": "assistant", "content": "No."}
GOOD_BAD = (RowAnswer("", (ANSWER,), 1.0), RowAnswer("", (BAD,), -1.0))
TEXTS = (RowAnswer("Yes.", (), 1.0), RowAnswer("No.", (), -1.0))
PROMPT = (("Hi? ", False),)
SHAREGPT = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]


def vocabulary() -> Tokenizer:
    """A token for each byte."""
    keys, _ = byte_vocabulary()
    return tokenizer.from_metadata({name: key.value for name, key in keys.items()}, path="bytes")


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"messages": [USER, ANSWER], "id": 3}, DatasetRow(1, messages=(USER, ANSWER))),
        ({"prompt": [USER], "completion": [ANSWER]}, DatasetRow(1, messages=(USER, ANSWER))),
        ({"conversations": SHAREGPT}, DatasetRow(1, messages=(USER, ANSWER))),
        (
            {"system": "Be.", "conversations": SHAREGPT, "tools": []},
            DatasetRow(1, messages=({"role": "system", "content": "Be."}, USER, ANSWER)),
        ),
        (
            {
                "input": {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},
                "preferred_output": [ANSWER],
                "non_preferred_output": [BAD],
            },
            DatasetRow(1, (), (USER,), ({"type": "function", "function": {"name": "f"}},), GOOD_BAD),
        ),
        ({"prompt": "Hi? ", "chosen": "Yes.", "rejected": "No."}, DatasetRow(1, PROMPT, answers=TEXTS)),
        ({"chosen": "Hi? Yes.", "rejected": "Hi? No."}, DatasetRow(1, (("Hi?", False),), answers=(
            RowAnswer(" Yes.", (), 1.0), RowAnswer(" No.", (), -1.0)))),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [BAD]}, DatasetRow(1, messages=(USER,), answers=GOOD_BAD)),
        (  # UltraFeedback's: the prompt again, as a text
            {"prompt": "Hi?", "chosen": [USER, ANSWER], "rejected": [USER, BAD], "messages": [USER]},
            DatasetRow(1, messages=(USER,), answers=GOOD_BAD),
        ),
        ({"prompt": "Hi? ", "completion": "Yes.", "label": True}, DatasetRow(1, PROMPT, answers=TEXTS[:1])),
        ({"prompt": "Hi? ", "completion": "No.", "label": "False"}, DatasetRow(1, PROMPT, answers=TEXTS[1:])),
        (
            {"prompt": [USER], "completion": [ANSWER], "label": 1},
            DatasetRow(1, messages=(USER,), answers=GOOD_BAD[:1]),
        ),
    ],
)  # fmt: skip
def test_fields_tell_the_format(row: dict[str, Any], found: DatasetRow) -> None:
    assert parse_row(row, 1, "x") == found


CALL = {"name": "add", "arguments": '{"a": 1}'}
TOOL_CALLS = [{"id": "add", "type": "function", "function": CALL}]
SYSTEM = {"role": "system", "content": "Be."}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        (  # OpenAI's first form of tools
            {"messages": [USER, {"role": "assistant", "content": "", "function_call": CALL}]},
            [USER, {"role": "assistant", "content": "", "tool_calls": TOOL_CALLS}],
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "function_call": CALL, "weight": 0},
                    {"role": "function", "name": "add", "content": "2"},
                    {**ANSWER, "function_call": None},
                ],
            },
            [
                USER,
                {"role": "assistant", "content": None, "weight": 0, "tool_calls": TOOL_CALLS},
                {"role": "tool", "name": "add", "content": "2", "tool_call_id": "add"},
                ANSWER,
            ],
        ),
        ({"system": "Be.", "messages": [USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"system": "Be.", "messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"system": "", "messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        ({"conversations": [{**USER, "role": "human"}, {**ANSWER, "role": "gpt"}]}, [USER, ANSWER]),
        ({"conversations": [SYSTEM, USER, {**BAD, "weight": 0}, USER, ANSWER]},
         [SYSTEM, USER, {**BAD, "weight": 0}, USER, ANSWER]),
        ({"conversations": [USER, {"role": "assistant", "content": "", "tool_calls": TOOL_CALLS}]},
         [USER, {"role": "assistant", "content": "", "tool_calls": TOOL_CALLS}]),
        (  # LLaMA-Factory's
            {"conversations": [SHAREGPT[0], {"from": "function_call", "value": json.dumps(CALL)},
                               {"from": "observation", "value": "2"}, SHAREGPT[1]], "tools": '[{"name": "add"}]'},
            [USER, {"role": "assistant", "content": "", "tool_calls": TOOL_CALLS}, {"role": "tool", "content": "2"},
             ANSWER],
        ),
        (
            {"instruction": "Hi?", "output": "Yes.", "system": "Be.", "history": [["a", "b"], ["c", "d"]]},
            [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
             {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, USER, ANSWER],
        ),
        ({"instruction": "Hi?", "output": "Yes.", "system": None, "history": []}, [USER, ANSWER]),
    ],
)  # fmt: skip
def test_older_and_foreign_fields_become_messages(row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    result = parse_row(row, 1, "x")
    assert list(result.messages) == messages
    assert not result.unused


def test_history_and_system_stand_in_the_prompt_of_a_model_without_template() -> None:
    row = {"instruction": "Add.", "input": "1", "output": "2", "system": "Be.", "history": [["a", "b"]]}
    result = parse_row(row, 1, "x").parts
    assert result == (
        ("Be.\n\n### Instruction:\na\n\n### Response:\n", False),
        ("b", True),
        ("\n\n### Instruction:\nAdd.\n\n### Input:\n1\n\n### Response:\n", False),
        ("2", True),
    )


@pytest.mark.parametrize("key", ["tools", "functions"])
@pytest.mark.parametrize("form", ["alone", "flat", "whole"])
def test_functions_are_tools(key: str, form: str) -> None:
    function = {"name": "add", "parameters": {"type": "object"}}
    whole = {"type": "function", "function": function}
    value = [{"alone": function, "flat": {"type": "function", **function}, "whole": whole}[form]]
    for written in (value, json.dumps(value)):
        result = parse_row({"messages": [USER, ANSWER], key: written}, 1, "x")
        assert result.tools == ({"type": "function", "function": function},)


def test_pairs_of_instructions_and_conversations_have_their_prompts() -> None:
    row = {"instruction": "Hi?", "input": "", "chosen": "Yes.", "rejected": "No.", "history": [["a", "b"]]}
    result = parse_row(row, 1, "x")
    history = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    assert result.messages == (*history, USER)
    assert result.answers == TEXTS
    assert [learned for _, learned in result.parts] == [False] * 3
    v = vocabulary()
    for template, end in ((ChatTemplate("chatml", bos_token="", eos_token="</s>"), "<|im_end|>\n</s>"), (None, "</s>")):
        ((good, bad),) = Reader(v, template, objective("dpo")).examples([result], "x")
        assert v.decode(good.tokens[good.learn], special=True).decode().replace("</s>", "").startswith("Yes."), end
        assert v.decode(bad.tokens[bad.learn], special=True).decode().replace("</s>", "").startswith("No.")
    for turn in ({"from": "gpt", "value": "Yes."}, ANSWER):
        bad_turn = {"from": "gpt", "value": "No."}
        result = parse_row({"conversations": SHAREGPT[:1], "chosen": turn, "rejected": bad_turn}, 1, "x")
        assert (result.messages, result.answers) == ((USER,), GOOD_BAD)


def test_variables_of_a_row_reach_the_template() -> None:
    source = (
        "{{ '[' ~ mood ~ ']' if mood is defined }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}{{ '' if enable_thinking else '(no thought)' }}"
    )
    template = ChatTemplate(source, bos_token="", eos_token="")
    v = vocabulary()
    variables = {"mood": "calm", "enable_thinking": False}
    rows = [
        {"messages": [USER, ANSWER], "chat_template_kwargs": variables},
        {"prompt": [USER], "completion": [ANSWER], "chat_template_kwargs": variables},
        {"conversations": SHAREGPT, "chat_template_kwargs": variables},
        {"instruction": "Hi?", "output": "Yes.", "chat_template_kwargs": variables},
    ]
    for row in rows:
        ((example,),) = Reader(v, template).examples([parse_row(row, 1, "x")], "x")
        assert v.decode(example.tokens).decode().strip().startswith("[calm]user:Hi?;assistant:Yes.;(no thought)"), row
    pair = {"prompt": [USER], "chosen": [ANSWER], "rejected": [BAD], "chat_template_kwargs": variables}
    ((good, _),) = Reader(v, template, objective("dpo")).examples([parse_row(pair, 1, "x")], "x")
    assert v.decode(good.tokens).decode().strip().startswith("[calm]user:Hi?")
    prompts = prompts_of([parse_row({"messages": [USER], "chat_template_kwargs": variables}, 1, "x")], v, template, "x")
    assert v.decode(prompts.tokens[0]).decode().strip().startswith("[calm]user:Hi?")
    ((plain,),) = Reader(v, template).examples([parse_row({"messages": [USER, ANSWER]}, 1, "x")], "x")
    assert v.decode(plain.tokens).decode().strip().startswith("user:Hi?;assistant:Yes.;")


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([{"text": "a", "system": "Be.", "id": 3}], ["system"]),
        ([{"prompt": "a", "completion": "b", "tools": [{}], "chat_template_kwargs": {}}],
         ["tools", "chat_template_kwargs"]),
        ([{"messages": [USER, {**ANSWER, "mask": False, "thinking": "Hm."}], "functions": []},
          {"messages": [USER, ANSWER], "context": "x", "note": None}],
         ["messages[].mask", "messages[].thinking", "context"]),
        ([{"instruction": "a", "output": "b", "kto_tag": True, "text": "all"}], ["kto_tag"]),
        ([{"conversations": SHAREGPT, "source": "x", "images": ["a.png"]}], ["images"]),
        ([{"input": {"messages": [USER], "notes": "x"}, "preferred_output": [ANSWER],
           "non_preferred_output": [{**BAD, "mood": "x"}], "tools": []}], ["tools", "input.notes", "messages[].mood"]),
        ([{"messages": [USER, ANSWER], "tools": [], "system": "a", "chat_template_kwargs": {"a": 1}, "url": "x"}], []),
        ([{"prompt": "a", "chosen": [USER, ANSWER], "rejected": [USER, BAD], "messages": [USER]}], []),
    ],
)  # fmt: skip
def test_fields_that_nothing_is_made_of_are_named_once(rows: list[dict[str, Any]], names: list[str]) -> None:
    pairs = any("chosen" in row or "preferred_output" in row for row in rows)
    template = ChatTemplate("chatml", bos_token="", eos_token="</s>")
    reader = Reader(vocabulary(), template, objective("dpo") if pairs else None)
    result = arranged(rows, "rows", reader, TrainingConfig(ctx_size=512, batch_size=1))
    lines = [line for line in result.losses if "nothing is made of" in line]
    assert lines == ([f"fields of rows that nothing is made of: {', '.join(map(repr, names))}"] if names else [])


def test_a_message_field_that_the_template_reads_is_not_named() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.thinking }}{{ m.content }}{% endfor %}"
    rows = [{"messages": [USER, {**ANSWER, "thinking": "Hm.", "think": "x"}]}]
    reader = Reader(vocabulary(), ChatTemplate(source, bos_token="", eos_token=""))
    result = arranged(rows, "rows", reader, TrainingConfig(ctx_size=512, batch_size=1))
    assert next(line for line in result.losses if "nothing" in line).endswith(": 'messages[].think'")


def test_fields_beside_a_prompt_are_the_graders() -> None:
    row = parse_row({"messages": [USER], "system": "x", "reference": "y"}, 1, "x")
    assert (row.messages, row.unused) == ((USER,), ())


def test_alpaca_is_a_conversation_or_its_authors_prompt() -> None:
    row = parse_row({"instruction": "Add.", "input": "1, 2", "output": "3", "text": "all of it"}, 1, "x")
    assert row.messages == ({"role": "user", "content": "Add.\n\n1, 2"}, {"role": "assistant", "content": "3"})
    (asked, learned), (answer, also) = row.parts
    assert (learned, answer, also) == (False, "3", True)
    assert asked.endswith(
        "that provides further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n"
    )
    bare = parse_row({"instruction": "Add.", "input": "", "output": "3"}, 1, "x")
    assert bare.messages[0]["content"] == "Add."
    assert "Input" not in bare.parts[0][0]
    v = vocabulary()
    template = ChatTemplate("chatml", bos_token="", eos_token="</s>")
    for result, begin in ((Reader(v, template), "<|im_start|>user"), (Reader(v, None), "Below is")):
        ((example,),) = result.examples([bare], "x")
        assert begin in v.decode(example.tokens).decode()[:20]
        assert v.decode(example.tokens[example.learn]).decode().startswith("3")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"chosen": "a"}, "field 'rejected' must be a string"),
        ({"chosen": [ANSWER], "rejected": "b"}, "field 'rejected' must be a non-empty array"),
        ({"chosen": [ANSWER], "rejected": [BAD]}, "'chosen' and 'rejected' begin differently"),
        ({"chosen": [USER], "rejected": [BAD], "prompt": [USER]}, "field 'chosen': no message of the assistant"),
        ({"preferred_output": [ANSWER]}, "field 'input' must be an object"),
        (
            {"input": {"messages": []}, "preferred_output": [ANSWER], "non_preferred_output": [BAD]},
            "field 'input.messages' must be a non-empty array",
        ),
        (
            {"input": {"messages": [USER]}, "preferred_output": [{"role": "x"}], "non_preferred_output": [BAD]},
            r"preferred_output\[0\]: field 'role' must be one of",
        ),
        ({"prompt": "a", "completion": "b", "label": "maybe"}, "field 'label' must be true or false"),
        ({"prompt": "a", "completion": "b", "label": 0.5}, "field 'label' must be true or false"),
        ({"conversations": [{"from": "bard", "value": "a"}]}, r"conversations\[0\]: field 'from' must be one of"),
        ({"conversations": [{"from": "gpt", "value": 1}]}, r"conversations\[0\]: field 'value' must be a string"),
        ({"conversations": SHAREGPT[:1]}, "no message of the assistant"),
        ({"instruction": "a"}, "field 'output' must be a string"),
        ({"instruction": "a", "output": ""}, "field 'output' is empty"),
        ({"instruction": "a", "output": "b", "input": 3}, "field 'input' must be a string"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "field 'history' must be an array of pairs"),
        ({"instruction": "a", "output": "b", "history": "x"}, "field 'history' must be an array of pairs"),
        ({"instruction": "a", "output": "b", "system": 3}, "field 'system' must be a string"),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "c"}, "field 'system': the conversation has another"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": []}, "field 'chat_template_kwargs' must be an object"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"tools": []}}, "must not contain 'tools'"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": 1}}, "must be true or false"),
        (
            {"messages": [USER, {"role": "assistant", "content": "", "function_call": {"a": 1}}]},
            r"messages\[1\]: field 'function_call' must be an object with the name",
        ),
        ({"messages": [USER, {**ANSWER, "function_call": CALL, "tool_calls": TOOL_CALLS}]}, "there are 'tool_calls'"),
        ({"messages": [USER, ANSWER], "functions": [{}], "tools": [{}]}, "field 'functions': there are 'tools', too"),
        ({"messages": [USER, ANSWER], "tools": [{}]}, r"field 'tools\[0\]' must be a function with a name"),
        ({"messages": [USER, ANSWER], "tools": [{"type": "web_search"}]}, r"'tools\[0\]' must be a function with"),
        (
            {"messages": [USER, ANSWER], "tools": [{"function": 1}]},
            r"field 'tools\[0\]' must be a function with a name",
        ),
        ({"messages": [USER, ANSWER], "tools": "[{"}, "field 'tools': is not valid JSON"),
        ({"conversations": [{"role": "bard", "content": "a"}]}, r"conversations\[0\]: field 'role' must be one of"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, r"conversations\[0\]: field 'value': is not"),
        ({"conversations": SHAREGPT[:1], "chosen": {"from": "gpt", "value": "a"}}, "field 'rejected' must be a string"),
    ],
)
def test_bad_fields_are_named(row: dict[str, Any], told: str) -> None:
    with pytest.raises(TrainingError, match=f"^x: {told}|^x: .*{told}"):
        parse_row(row, 1, "x")


def test_files_of_all_kinds_have_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": 'a, "b"\nc', "completion": "x"}, {"prompt": "ä", "completion": "[1]"}]
    messages = [{"messages": [USER, ANSWER]}]
    expected = [parse_row(row, 0, "x").parts for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "a.csv").write_bytes('\ufeffprompt,completion,other\r\n"a, ""b""\nc",x,\r\nä,[1],9\r\n'.encode())
    for name, lines in (("a.jsonl", [1, 2]), ("a.json", [1, 2]), ("a.csv", [2, 4])):
        result = list(rows_of(tmp_path / name, name))
        assert [row.parts for row in result] == expected, name
        assert [row.line for row in result] == lines
        assert is_rows(name)
    (tmp_path / "m.csv").write_text('messages\n"' + json.dumps(messages[0]["messages"]).replace('"', '""') + '"\n')
    assert [row.messages for row in rows_of(tmp_path / "m.csv", "m.csv")] == [(USER, ANSWER)]
    assert [row.parts for row in rows_of(tmp_path / "a.csv", "stored", "a.csv")] == expected


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.csv", b"", "has no rows"),
        ("a.csv", b"text\n", "has no rows"),
        ("a.csv", b"text,text\na,b\n", "line 1: column 'text' stands twice"),
        ("a.csv", b"text\na\nb,c\n", "line 3: has 2 cells, and the header has 1"),
        ("a.csv", b'prompt,completion\na,"b', "line 2: is not valid CSV: unexpected end of data"),
        ("a.csv", b"prompt,completion\na,\n", "line 2: field 'completion' must be a string"),
        ("a.csv", b"messages\n[{x\n", "line 2: field 'messages': is not valid JSON"),
        ("a.csv", b"text\n\xff\n", "line 2: byte 0 is not UTF-8"),
        ("a.json", b"{}", "must be an array of objects"),
        ("a.json", b"[]", "has no rows"),
        ("a.json", b"[1]", "line 1: must be a JSON object"),
        ("a.json", b'[\n{"text": }\n]', "is not valid JSON: Expecting value: line 2, column 10"),
        ("a.jsonl", b'{"text": "a"}\n{"messages": [{"role": "assistant", "content": "a"}]}',
         r"line 2: is a conversation \('messages'\), and line 1 is a text"),
    ],
)  # fmt: skip
def test_files_at_fault_are_named(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainingError, match=f"^{name}: .*{told}|^{name}: {told}"):
        list(rows_of(tmp_path / name, name))


def test_parquet_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"no")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        with pytest.raises(TrainingError, match=r"needs pyarrow: pip install 'logitless\[data\]'"):
            list(rows_of(tmp_path / "bad.parquet", "bad"))
        return
    table = pyarrow.Table.from_pylist([{"chosen": [USER, ANSWER], "rejected": [USER, BAD]}] * 2)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    result = list(rows_of(tmp_path / "a.parquet", "a"))
    assert result == [DatasetRow(i, messages=(USER,), answers=GOOD_BAD) for i in (1, 2)]
    with pytest.raises(TrainingError, match="bad: is no valid Parquet file"):
        list(rows_of(tmp_path / "bad.parquet", "bad"))


def test_data_sets_are_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(path: str, *, split: str) -> list[dict[str, str]]:
        asked.append((path, split))
        if path == "nobody/nothing":
            raise FileNotFoundError("no such\nset")
        return [{"text": "a"}]

    fake = SimpleNamespace(load_dataset=load_dataset, disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert is_rows("hf:some/set")
    for source in ("hf:some/set", "hf:some/set:test[:9]"):
        assert [row.parts for row in rows_of(source, source)] == [(("a", True),)]
    assert asked == [("some/set", "train"), ("some/set", "test[:9]")]
    with pytest.raises(TrainingError, match="hf:nobody/nothing: cannot be loaded: no such set"):
        list(rows_of("hf:nobody/nothing", "hf:nobody/nothing"))
    with pytest.raises(TrainingError, match="a data set's name is missing"):
        list(rows_of("hf:", "hf:"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TrainingError, match=r"needs datasets: pip install 'logitless\[data\]'"):
        list(rows_of("hf:some/set", "hf:some/set"))


def test_the_context_follows_the_longest_answer() -> None:
    v = vocabulary()
    reader = Reader(v, None, objective("dpo"))
    rows = [{"prompt": "a" * 100, "chosen": "b" * 99, "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    assert context_for(rows, "rows", reader, 4096) == 208  # BOS, 199 bytes, and an end that is a label alone
    assert context_for(rows, "rows", reader, 128) == 128
    data = arranged(rows, "rows", reader, TrainingConfig(ctx_size=208, batch_size=2))
    windows = data.order.take(2)
    learned = np.concatenate([w.labels[w.weights > 0] for w in windows])
    assert len(learned) == 99 + 1 + 2 + 2 + 2  # answers, and their ends


def test_an_answer_that_a_template_would_rewrite_is_refused() -> None:
    class Rewriting:
        def render(self, messages: list[Any], *, add_generation_prompt: bool, tools: object) -> str:
            return f"{len(messages)}:" + "".join(m["content"] for m in messages)

    reader = Reader(vocabulary(), Rewriting(), objective("dpo"))  # type: ignore[arg-type]
    rows = [parse_row({"prompt": [USER], "chosen": [ANSWER, USER, ANSWER], "rejected": [BAD]}, 7, "x")]
    with pytest.raises(TrainingError, match="x: line 7: the chat template rewrites earlier turns"):
        list(reader.examples(rows, "x"))
