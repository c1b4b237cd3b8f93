"""Training data: windows, samples and their order, against hand-worked tables."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from logitless.models import tokenizer
from logitless.models.chat.template import ChatTemplate
from logitless.models.gguf.file import GGUFFile
from logitless.models.tokenizer import Tokenizer
from logitless.training.config import TrainingConfig
from logitless.training.data import tokenize_rows
from logitless.training.data.dataset_rows import DatasetRow
from logitless.training.data.formats import parse_row
from logitless.training.data.load import Reader, load_dataset, text_dataset
from logitless.training.data.packing import Examples, Groups, PackedExamples, StridedSamples, TextSamples, find_samples
from logitless.training.data.sampler import ExampleSampler, Sampler, split, split_samples
from logitless.training.data.sources import MAX_LINE, read_rows
from logitless.training.data.tokenize_rows import Example, encode_parts, examples_of, row_texts
from logitless.training.errors import TrainingError
from logitless.training.scratch import byte_vocabulary

RNG = np.random.default_rng(0)


def vocabulary(shared_data: Path, name: str) -> Tokenizer:
    path = shared_data / "vocabs" / f"ggml-vocab-{name}.gguf"
    with GGUFFile.open(path) as gguf:
        return tokenizer.from_metadata(gguf.metadata, path=path)


def bytes_vocabulary() -> Tokenizer:
    keys, _ = byte_vocabulary()
    return tokenizer.from_metadata({name: key.value for name, key in keys.items()}, path="bytes")


def test_every_text_is_its_bytes() -> None:
    v = bytes_vocabulary()
    text = " two  spaces, ümläute\n\tand 日本 "
    ids = v.encode(text, add_special=False)
    assert len(ids) == len(text.encode())
    assert v.decode(ids).decode() == text


def test_windows_of_a_text() -> None:
    windows = StridedSamples(np.arange(20, dtype=np.int32), 8)
    assert windows.begins.tolist() == [0, 4, 8]
    w = windows.sample(1, RNG)
    assert w.tokens.tolist() == list(range(4, 12))
    assert w.labels.tolist() == list(range(5, 13))
    assert len(StridedSamples(np.arange(9, dtype=np.int32), 8)) == 1
    with pytest.raises(TrainingError, match="short: has 8 tokens, fewer than the 9 that one sample of 8 needs"):
        StridedSamples(np.arange(8, dtype=np.int32), 8, name="short")


SAMPLES = "abcdABCD0123"
BOS, EOS = 1, 2


def filled(offset: int, **options: bool) -> str:
    tokens = np.frombuffer(SAMPLES.encode(), np.uint8).astype(np.int32)
    config = TrainingConfig(sample_random_offsets=True, **options)
    samples = TextSamples(tokens, [0, 4, 8], [4, 4, 4], 8, BOS, EOS, config)
    fixed = SimpleNamespace(integers=lambda low, high: offset)
    window = samples.sample(0, fixed)  # type: ignore[arg-type]
    assert window.tokens.tolist() == [BOS, *window.labels[:-1].tolist()]
    return "".join({BOS: "<", EOS: ">"}.get(t, chr(t)) for t in window.labels)


def test_samples_fill_windows() -> None:
    """The example of llama.cpp's finetune: samples abcd, ABCD, 0123 and windows of 8."""
    assert [filled(o) for o in range(3)] == ["abcd>>>>", "bcd>>>>>", "cd>>>>>>"]
    joined = [filled(o, fill_with_next_samples=True, separate_with_bos=False) for o in range(4)]
    assert joined == ["abcdABCD", "bcdABCD0", "cdABCD01", "dABCD012"]
    assert filled(0, fill_with_next_samples=True, separate_with_eos=True) == "abcd><AB"
    assert filled(2, fill_with_next_samples=True) == "cd<ABCD<"


def test_where_samples_begin() -> None:
    text = "x #a b #cd #e"
    assert [text[a:b] for a, b in find_samples(text, "#", 4)] == ["a b ", "cd ", "e"]
    assert [text[a:b] for a, b in find_samples(text, "#", 4, include_start=True)] == ["#a b ", "#cd ", "#e"]
    assert [text[a:b] for a, b in find_samples(text, "#", 5, overlapping=True)] == ["a b #", "cd #e", "e"]
    assert find_samples(text, "@", 4) == [(0, len(text))]


def test_every_token_begins_a_sample() -> None:
    dataset = text_dataset("abcdef", "t", bytes_vocabulary(), TrainingConfig(ctx_size=4, sample_start=""))
    assert dataset.begins.tolist() == [0, 1, 2]
    assert [chr(t - 3) for t in dataset.sample(1, RNG).labels] == ["b", "c", "d", "e"]


def example(n: int, first: int, learned: int = 0) -> Example:
    learn = np.arange(n) >= learned
    learn[0] = False
    return Example(np.arange(first, first + n, dtype=np.int32), learn)


def test_packed_examples_do_not_see_each_other() -> None:
    packed = PackedExamples([example(4, 10), example(3, 20), example(13, 30, learned=6)], 8)
    assert packed.sizes.tolist() == [5, 8, 4]
    w = packed.sample(0, RNG)
    assert w.tokens.tolist() == [10, 11, 12, 20, 21, 0, 0, 0]
    assert w.labels.tolist() == [11, 12, 13, 21, 22, 0, 0, 0]
    assert w.weights.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert w.starts == (0, 3, 5)
    assert packed.sample(1, RNG).weights.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert packed.sample(2, RNG).tokens[:4].tolist() == [38, 39, 40, 41]
    single = PackedExamples([example(4, 10), example(3, 20)], 8, pack=False)
    assert len(single) == 2
    both = single.joined(packed)
    assert (both.sizes.tolist(), both.begins.tolist()) == ([3, 2, 5, 8, 4], [0, 3, 5, 10, 18])
    for i, same in ((1, single.sample(1, RNG)), (2, w), (4, packed.sample(2, RNG))):
        for name in ("tokens", "labels", "weights", "starts"):
            assert np.array_equal(getattr(both.sample(i, RNG), name), getattr(same, name))
    with pytest.raises(TrainingError, match="data: has no token to learn"):
        PackedExamples([example(4, 0, learned=9)], 8, name="data")


def test_cut_and_dropped_examples_are_told() -> None:
    """The inputs of 9, 13 and 5 tokens: only the first two are longer than 4 and a label."""
    packed = PackedExamples([example(9, 0), example(13, 0, learned=12), example(5, 0), example(3, 0, learned=3)], 4)
    assert packed.losses == [
        "2 of 4 examples are longer than the context of 4 tokens (the longest has 13): "
        "12 tokens beyond it do not see the beginning",
        "1 of 4 examples have no token to learn and are dropped",
    ]
    assert PackedExamples([example(5, 0)], 4).losses == []


def test_validation_tokens_are_never_trained_on() -> None:
    text = np.arange(3, 203, dtype=np.int32)
    every = TrainingConfig(ctx_size=16, sample_start="")
    filled = TrainingConfig(ctx_size=16, sample_start="ab", fill_with_next_samples=True)
    letters = "".join(chr(0x21 + i % 90) for i in range(200)).replace("!", "ab")
    for data in (
        StridedSamples(text, 16),
        StridedSamples(text, 16, stride=16),
        StridedSamples(text, 16, stride=3),
        text_dataset(letters, "t", bytes_vocabulary(), every),
        text_dataset("".join(f"ab{i:04} {i * i:07}" for i in range(40)), "t", bytes_vocabulary(), filled),
        PackedExamples([example(2 + i % 9, 7 * i) for i in range(60)], 16),
    ):
        training, held_out = split_samples(data, 0.2, 1)
        assert len(training) > 0.5 * len(data)
        assert 0.1 * len(data) < len(held_out) <= round(0.2 * len(data))
        at = [set(range(data.begins[i], data.ends[i])) for i in range(len(data))]
        learned = {p for i in training for p in at[i]}
        assert not any(learned & at[i] for i in held_out)
    labels = [set(StridedSamples(text, 16).sample(int(i), RNG).labels.tolist()) for i in range(23)]
    training, held_out = split_samples(StridedSamples(text, 16), 0.2, 1)
    assert not set().union(*(labels[i] for i in training)) & set().union(*(labels[i] for i in held_out))
    with pytest.raises(TrainingError, match="leaves none apart"):
        split_samples(StridedSamples(text[:50], 30), 0.5, 1)


def test_order_is_resumed_exactly() -> None:
    data = StridedSamples(np.arange(400, dtype=np.int32), 8)
    train, val = split(len(data), 0.1, 7)
    assert not set(train.tolist()) & set(val.tolist())
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(len(data)))
    assert len(val) == round(len(data) * 0.1)
    whole = Sampler(data, train, "f", seed=7)
    visited = [int(w.tokens[0]) for w in whole.take(3 * len(train))]
    assert [sorted(visited[i : i + len(train)]) for i in (0, len(train))] == [sorted(visited[-len(train) :])] * 2
    assert visited[: len(train)] != visited[len(train) : 2 * len(train)]
    first = Sampler(data, train, "f", seed=7)
    n = len(train) + 17
    assert [int(w.tokens[0]) for w in first.take(n)] == visited[:n]
    second = Sampler(data, train, "f", seed=99)
    assert second.restore(json.loads(json.dumps(first.state())))
    assert [int(w.tokens[0]) for w in second.take(len(visited) - n)] == visited[n:]
    assert not Sampler(data, train, "other", seed=7).restore(first.state())
    assert not Sampler(data, train, "f", seed=7).restore(first.state(), force_reshuffle=True)


@pytest.mark.parametrize("validation", [0.0, 0.2])
@pytest.mark.parametrize("method", ["text", "rows", "examples"])
def test_without_shuffle_samples_keep_the_order_of_the_data(method: str, validation: float) -> None:
    """In each epoch, also behind a resumed one; with shuffle in none."""
    data: Any
    if method == "text":
        data = StridedSamples(np.arange(400, dtype=np.int32), 8, 8)
    elif method == "rows":
        data = PackedExamples([example(2 + i % 9, 20 * i) for i in range(60)], 16)
    else:
        data = Examples([example(2 + i % 9, 20 * i) for i in range(60)], 16)
    train, held_out = split_samples(data, validation, 7) if method != "examples" else split(len(data), validation, 7)
    kind: Any = ExampleSampler if method == "examples" else Sampler

    def epochs(order: Any, n_epochs: int) -> list[list[int]]:
        if method == "examples":
            return [[int(order.draw(1)[0]) for _ in range(len(order))] for _ in range(n_epochs)]
        return [[int(order.take(1)[0].tokens[0]) for _ in range(len(order))] for _ in range(n_epochs)]

    order = kind(data, train, "f", seed=7, shuffle=False)
    visited = epochs(order, 2)
    assert all(epoch == sorted(epoch) and len(set(epoch)) == len(train) for epoch in visited)
    again = kind(data, train, "f", seed=7, shuffle=False)
    assert again.restore(json.loads(json.dumps(order.state())))
    assert epochs(again, 1) == visited[:1]
    assert len(train) + len(held_out) == len(data)
    shuffled = epochs(kind(data, train, "f", seed=7), 2)
    assert all(epoch != sorted(epoch) for epoch in shuffled)
    assert [sorted(epoch) for epoch in shuffled] == visited


def test_the_assistants_part_is_learned(shared_data: Path) -> None:
    v = vocabulary(shared_data, "qwen2")
    template = ChatTemplate("chatml", bos_token="", eos_token="<|im_end|>")
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "No.", "weight": 0},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because it rains."},
    )
    (result,) = examples_of([DatasetRow(1, messages=messages)], v, template)
    assert v.decode(result.tokens[result.learn], special=True).decode() == "Because it rains.<|im_end|>\n"
    plain = [{k: x for k, x in m.items() if k != "weight"} for m in messages]
    assert result.tokens.tolist() == v.encode(template.render(plain, add_generation_prompt=False))


@pytest.mark.parametrize("name", ["train", "loss"])
@pytest.mark.parametrize("turns", ["messages", "conversations"])
def test_a_message_that_says_it_is_not_trained_is_not_learned(name: str, turns: str, shared_data: Path) -> None:
    v = vocabulary(shared_data, "qwen2")
    template = ChatTemplate("chatml", bos_token="", eos_token="<|im_end|>")
    said: list[tuple[str, str, bool | None]] = [
        *(("user", "Hi?", False), ("assistant", "No.", False), ("user", "Why?", None)),
        *(("assistant", "Rain.", True), ("user", "And?", None), ("assistant", "Snow.", None)),
    ]
    keys = ("role", "content") if turns == "messages" else ("from", "value")
    rows = [{keys[0]: role, keys[1]: text} | ({} if flag is None else {name: flag}) for role, text, flag in said]
    record = parse_row({turns: rows}, 1, "f: line 1")
    assert not record.unused
    (result,) = examples_of([record], v, template)
    learned = v.decode(result.tokens[result.learn], special=True).decode()
    assert learned == "Rain.<|im_end|>\nSnow.<|im_end|>\n"
    plain = [{"role": role, "content": text} for role, text, _ in said]
    assert result.tokens.tolist() == v.encode(template.render(plain, add_generation_prompt=False))


def test_a_template_that_rewrites_turns_gives_an_example_a_turn(shared_data: Path) -> None:
    """Qwen 3 drops what the assistant thought in earlier turns."""
    v = vocabulary(shared_data, "qwen2")
    source = (shared_data / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    template = ChatTemplate(source, bos_token="", eos_token="<|im_end|>")
    thought = "<think>\nhm\n</think>\n\n"
    messages = (
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": f"{thought}one"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": f"{thought}two"},
    )
    result = list(examples_of([DatasetRow(1, messages=messages)], v, template))
    learned = [v.decode(e.tokens[e.learn], special=True).decode() for e in result]
    assert [text.split("</think>")[-1].strip() for text in learned] == ["one<|im_end|>", "two<|im_end|>"]


def test_completions_follow_their_prompt_without_a_new_space(shared_data: Path) -> None:
    v = vocabulary(shared_data, "llama-spm")
    ids, learn = encode_parts([("Hello wor", False), ("ld, you", True)], v)
    prompt = v.encode("Hello wor", add_special=False)  # "world" is one token, and no request has it behind this prompt
    assert ids[: len(prompt)] == prompt
    assert learn == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert b"".join(map(v.piece, ids[len(prompt) :])) == b"ld, you"
    (e,) = examples_of([DatasetRow(1, parts=(("Hello", False), (" you", True)))], v, None)
    assert e.tokens.tolist() == [v.bos_id, *v.encode("Hello you", add_special=False), v.eos_id]
    assert e.learn.tolist() == [False, False, True, True]


@pytest.mark.parametrize("vocab", ["qwen2", "llama-spm", "gpt-2", "starcoder"])
def test_a_completion_that_shares_a_token_with_its_prompt_is_learned_whole(shared_data: Path, vocab: str) -> None:
    v = vocabulary(shared_data, vocab)
    for prompt, completion in (
        ("Hello wor", "ld"),
        ("The answer is Par", "is"),
        ("a", "nd"),
        ("x = 1", "23;"),
        ("é", "té"),
        ("Hello ", "you"),
        ("a ", "b"),
    ):
        (e,) = examples_of([DatasetRow(1, parts=((prompt, False), (completion, True)))], v, None)
        learned = e.tokens[e.learn].tolist()
        if v.eos_id is not None:
            assert learned.pop() == v.eos_id
        assert b"".join(map(v.piece, learned)) == completion.encode(), (prompt, completion)
        head = e.tokens[~e.learn].tolist()
        assert head == [*([v.bos_id] if v.add_bos else []), *v.encode(prompt, add_special=False)]
    # whole words: the tokens of the joined text
    (e,) = examples_of([DatasetRow(1, parts=(("Hello", False), (" world, you", True)))], v, None)
    joined = v.encode("Hello world, you", add_special=False)
    assert [t for t in e.tokens.tolist() if t not in (v.bos_id, v.eos_id)] == joined


def test_special_tokens_of_all_rows_are_those_of_inference(shared_data: Path) -> None:
    """A text and a completion in a template's format have the ids that the template has."""
    v = vocabulary(shared_data, "qwen2")
    template = ChatTemplate("chatml", bos_token="", eos_token="<|im_end|>")
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"})
    whole = v.encode(template.render(list(messages), add_generation_prompt=False))
    for end, n in (("<|im_end|>", len(whole) - 1), ("<|im_end|>\n", len(whole)), ("", len(whole) - 1)):
        rows = [
            DatasetRow(1, ((f"{prompt}yo{end}", True),)),
            DatasetRow(2, ((prompt, False), (f"yo{end}", True))),
            DatasetRow(3, messages=messages),
        ]
        text, completion, chat = examples_of(rows, v, template)
        assert chat.tokens.tolist() == whole
        assert text.tokens.tolist() == completion.tokens.tolist() == whole[:n]  # `end` is not doubled
        assert completion.learn.tolist() == chat.learn.tolist()[:n]
    v = vocabulary(shared_data, "llama-spm")
    (once,) = examples_of([DatasetRow(1, (("<s>Hello</s>", True),))], v, None)
    assert once.tokens.tolist() == [v.bos_id, *v.encode("Hello", add_special=False), v.eos_id]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("[1]", "line 2: must be a JSON object"),
        ('{"a": 1}', "line 2: must have one of 'text'"),
        ('{"text": "a", "prompt": "b"}', "line 2: must have one of 'text'"),
        ('{"prompt": "a", "completion": 1}', "line 2: field 'completion' must be a string"),
        ('{"text": NaN}', "line 2: is not valid JSON: NaN is not a JSON number"),
        ('{"text": "\\ud800"}', "line 2: a surrogate escape without its partner"),
        ('{"text": "a", "text": "b"}', "line 2: key 'text' stands twice"),
        ('{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "line 2: key 'role' stands twice"),
        ('{"text": ' + "[" * 100_000, "line 2: is nested too deeply"),
        ('{"text": "' + "a" * MAX_LINE + '"}', f"line 2: is longer than {MAX_LINE} bytes"),
        ('{"text": "a"\n', "line 2: is not valid JSON: Expecting ',' delimiter: column 1"),
        ('{"messages": []}', "line 2: field 'messages' must be a non-empty array"),
        ('{"messages": [{"role": "judge", "content": "a"}]}', "line 2: messages[0]: field 'role' must be one of"),
        ('{"messages": [{"role": "assistant"}]}', "line 2: messages[0]: field 'content' must be a string"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 2}]}', "field 'weight' must be 0 or 1"),
        ('{"messages": [{"role": "assistant", "content": "a", "train": "no"}]}', "field 'train' must be true or false"),
        ('{"messages": [{"role": "user", "content": "a", "train": true}]}', "field 'train': only the assistant's"),
        (
            '{"messages": [{"role": "assistant", "content": "a", "loss": true, "weight": 0}]}',
            "'weight' and 'loss' contra",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a", "loss": true, "train": false}]}',
            "'train' and 'loss' con",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a", "train": false}]}',
            "no message of the assistant is there",
        ),
    ],
)
def test_bad_rows_are_named(row: str, told: str) -> None:
    with pytest.raises(TrainingError) as refused:
        list(read_rows(BytesIO(b'{"text": "fine"}\n' + row.encode()), "rows.jsonl"))
    assert str(refused.value).startswith("rows.jsonl: ")
    assert told in str(refused.value)
    assert str(refused.value).count("line ") == 1


def test_encodings_and_empty_files() -> None:
    whole = b'\xef\xbb\xbf\r\n{"text": "a"}\r\n\n'
    assert list(read_rows(BytesIO(whole), "rows.jsonl")) == [DatasetRow(2, (("a", True),))]
    longest = b'\xef\xbb\xbf{"text": "' + b"a" * (MAX_LINE - 12) + b'"}\r\n{"text": "b"}'
    assert [record.line for record in read_rows(BytesIO(longest.replace(b"\r", b"")), "rows.jsonl")] == [1, 2]
    with pytest.raises(TrainingError, match="line 1: is longer"):
        list(read_rows(BytesIO(longest), "rows.jsonl"))
    for raw, told in (
        (b'{"text": "\xff"}', "line 1: byte 10 is not UTF-8"),
        ('{"text": "a"}'.encode("utf-16"), "line 1: byte 0 is not UTF-8"),
        ('{"text": "ä"}'.encode("latin-1"), "line 1: byte 10 is not UTF-8"),
        (b"", "has no rows"),
        (b" \n\r\n\t\n", "has no rows"),
    ):
        with pytest.raises(TrainingError) as refused:
            list(read_rows(BytesIO(raw), "rows.jsonl"))
        assert str(refused.value) == f"rows.jsonl: {told}"


def test_files_are_read_by_their_ending(tmp_path: Path) -> None:
    v = bytes_vocabulary()
    (tmp_path / "a.txt").write_text("To be, or not to be\0\0")
    windows = load_dataset(tmp_path / "a.txt", Reader(v, None), TrainingConfig(ctx_size=6, stride=6))
    assert len(windows) == 3
    assert windows.sample(0, RNG).tokens[0] == v.bos_id
    (tmp_path / "b.jsonl").write_text('{"text": "ab"}\n')
    assert load_dataset(tmp_path / "b.jsonl", Reader(v, None), TrainingConfig(ctx_size=6)).sample(0, RNG).labels[
        :3
    ].tolist() == [*v.encode("ab", add_special=False), v.eos_id]
    (tmp_path / "c.txt").write_bytes(b"a\xff")
    with pytest.raises(TrainingError, match="byte 1 is not UTF-8"):
        load_dataset(tmp_path / "c.txt", Reader(v, None), TrainingConfig())


class CountingTemplate:
    """Writes each message as its content; counts what it writes."""

    n_messages = 0

    def __init__(self, ending: str = "") -> None:
        self.ending = ending  # of a whole conversation: what later turns take back

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tools: object) -> str:
        self.n_messages += len(messages)
        return "".join(f"[{m['content']}]" for m in messages) + ("[" if add_generation_prompt else self.ending)


def conversation(n: int, text: str = "hi") -> DatasetRow:
    return DatasetRow(1, messages=tuple({"role": ("user", "assistant")[i % 2], "content": text} for i in range(n)))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (conversation(100_000), "d: line 1: 100000 messages with 50000 answers are too many for one row"),
        (conversation(1000, "x" * 2000), "d: line 1: 2002001 characters with 500 answers are too many for one row"),
    ],
)
def test_a_row_with_too_many_answers_is_refused_where_each_must_be_rendered(row: DatasetRow, problem: str) -> None:
    """By a template that rewrites earlier turns."""
    template = CountingTemplate(".")
    with pytest.raises(TrainingError, match=problem):
        list(row_texts([row], template, "d"))  # type: ignore[arg-type]
    assert template.n_messages <= 20 * len(row.messages)


def test_a_row_of_many_messages_is_rendered_a_few_times() -> None:
    """The number of renderings does not grow with the messages: the 100,000 of one row are learned."""
    template = CountingTemplate()
    ((_, parts, _),) = row_texts([conversation(100_000)], template, "d")  # type: ignore[arg-type]
    assert parts == [part for _ in range(50_000) for part in (("[hi][", False), ("hi]", True))]
    assert template.n_messages <= 12 * 100_000


def test_a_generation_prompt_that_answers_lack_is_told(shared_data: Path) -> None:
    """Its end is no part of what is learned; an answer that has it is as it is asked for."""
    v = vocabulary(shared_data, "qwen2")
    ends = LAST_THINKS.replace("<|assistant|>{% endif", "<|assistant|><think>\n{% endif").replace("<think></think>", "")
    template = ChatTemplate(ends, bos_token="", eos_token="")
    answers = ("one", "<think>\nhm</think>two", "three")
    asked = {"role": "user", "content": "1?"}
    rows = [
        DatasetRow(i, messages=(asked, {"role": "assistant", "content": answer})) for i, answer in enumerate(answers, 1)
    ]
    packed = PackedExamples(examples_of(rows, v, template), 64)
    assert packed.losses == [
        "2 of 3 examples are learned without '<think>\\n', which the chat template's generation prompt has before an "
        "answer: requests will have it"
    ]
    assert Groups([(example,) for example in examples_of(rows, v, template)], 64).losses == packed.losses
    assert PackedExamples(examples_of(rows[1:2], v, template), 64).losses == []
    rewriting = ChatTemplate(LAST_THINKS, bos_token="", eos_token="")
    assert PackedExamples(examples_of(rows, v, rewriting), 64).losses == []


TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>\n@<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CALLS = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
LAST_THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


WRITERS = {
    **{
        name: TURNS.replace("@", text)
        for name, text in {
            "plain": "{{ m.content }}",
            "trims": "{{ m.content | trim }}",
            "changes": "{{ m.content | upper }}",
            "calls": CALLS,
            "thoughts": "{{ m.content.split('</think>')[-1] }}",
            "counts": "{{ m.content | length }}",
        }.items()
    },
    "rewrites": LAST_THINKS,
}


@pytest.mark.parametrize("source", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("kind", ["plain", "blanks", "calls", "no weight", "two in a row", "begins"])
def test_long_rows_are_learned_as_short_ones(monkeypatch: pytest.MonkeyPatch, source: str, kind: str) -> None:
    """The exact search is the oracle, which renders the conversation up to each answer."""
    said = [
        {"role": "user", "content": f"q{i // 2}"} if i % 2 == 0 else {"role": "assistant", "content": f"<b>{i}"}
        for i in range(60)
    ]
    for i in range(1, 60, 2):
        if kind == "blanks":
            said[i]["content"] = f" \n{i} x </think> {i}\n\n"[i % 3 :]
        if kind == "calls" and i % 5 == 0:
            said[i] |= {"tool_calls": [{"function": {"name": "f", "arguments": {"a": i}}}]}
        if kind == "no weight" and i % 5 == 0:
            said[i] |= {"weight": 0}
    if kind == "two in a row":
        said.insert(5, said[5])
    if kind == "begins":
        said = said[1:]
    row, template = DatasetRow(1, messages=tuple(said)), ChatTemplate(source, bos_token="", eos_token="")
    texts = [parts for _, parts, _ in row_texts([row], template, "d")]
    monkeypatch.setattr(tokenize_rows, "FEW", 10_000)
    exact = [parts for _, parts, _ in row_texts([row], template, "d")]
    assert [[p for p in parts if p[0]] for parts in texts] == [[p for p in parts if p[0]] for parts in exact]


def test_rendering_ends_where_nobody_waits() -> None:
    n_left = 30

    def goes_on() -> None:
        nonlocal n_left
        n_left -= 1
        if not n_left:
            raise TimeoutError

    template = CountingTemplate(".")
    with pytest.raises(TimeoutError):
        list(row_texts([conversation(500)], template, "d", goes_on))  # type: ignore[arg-type]
    assert template.n_messages < 30 * 500


def test_a_long_conversation_is_learned() -> None:
    template = CountingTemplate()
    ((_, parts, _),) = row_texts([conversation(200)], template, "d")  # type: ignore[arg-type]
    assert parts == [part for _ in range(100) for part in (("[hi][", False), ("hi]", True))]
    turns = [parts for _, parts, _ in row_texts([conversation(6)], CountingTemplate("."), "d")]  # type: ignore[arg-type]
    assert turns == [[("[hi]" * (2 * i + 1) + "[", False), ("hi].", True)] for i in range(3)]
