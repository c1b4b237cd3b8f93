"""vLLM's, SGLang's and TGI's fields on the real engine: supported, or refused by name."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
LARK = 'start: "yes" | "no"'


@pytest.fixture(scope="module")
def server(serve_here_module: Any, shared_data: Path) -> Any:
    model = shared_data / "models" / "stories260K.gguf"
    return serve_here_module(model, "-c", "1024", "-np", "4", "--chat-template", "chatml")


def complete(server: Any, **fields: Any) -> dict[str, Any]:
    choice = server.post("/v1/completions", {"prompt": PROMPT, **GREEDY, "return_token_ids": True, **fields})["choices"]
    found: dict[str, Any] = choice[0]
    return found


def pieces(server: Any, ids: list[int]) -> list[str]:
    return [server.post("/detokenize", {"tokens": [id]})["content"] for id in ids]


def refusal(server: Any, path: str, body: dict[str, Any]) -> str:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post(path, body)
    with caught.value as error:
        assert error.code == 400
        said: str = json.load(error)["error"]["message"]
    return said


CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": SCHEMA}, r'\{\s*"a"\s*:\s*(1|22)\s*\}'),
    ({"guided_json": json.dumps(SCHEMA)}, r'\{\s*"a"\s*:\s*(1|22)\s*\}'),
    ({"json_schema": json.dumps({"enum": [7]})}, "7"),
    ({"guided_regex": "[xyz]{3}"}, "[xyz]{3}"),
    ({"regex": "[xyz]{3}"}, "[xyz]{3}"),
    ({"guided_choice": ["Zebra (1/2)", "Quilt."]}, r"Zebra \(1/2\)|Quilt\."),
    ({"guided_grammar": 'root ::= "q" [0-9]'}, "q[0-9]"),
    ({"guided_grammar": LARK}, "yes|no"),
    ({"ebnf": 'root ::= "q" [0-9]'}, "q[0-9]"),
    ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}}, r'\{\s*"a"\s*:\s*(1|22)\s*\}'),
    ({"structured_outputs": {"regex": "[xyz]{3}", "choice": None}}, "[xyz]{3}"),
    ({"structured_outputs": {"choice": ["Zebra", "Quilt"]}}, "Zebra|Quilt"),
    ({"structured_outputs": {"grammar": 'root ::= "q" [0-9]'}}, "q[0-9]"),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, r'\{\s*"a"\s*:\s*(1|22)\s*\}'),
    ({"response_format": {"type": "regex", "value": "[xyz]{3}"}}, "[xyz]{3}"),
]


@pytest.mark.parametrize(("fields", "pattern"), CONSTRAINTS)
def test_constraints(server: Any, fields: dict[str, Any], pattern: str) -> None:
    found = complete(server, **fields)
    assert re.fullmatch(pattern, found["text"], re.DOTALL), found["text"]
    assert found["finish_reason"] == "stop"
    said = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **GREEDY, **fields})
    assert re.fullmatch(pattern, said["choices"][0]["message"]["content"], re.DOTALL)


def test_any_object(server: Any) -> None:
    found = complete(server, structured_outputs={"json_object": True})["text"]
    assert found == complete(server, response_format={"type": "json_object"})["text"]
    assert found.startswith("{")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "a", "guided_choice": ["a"]}, "'guided_choice': cannot be combined with guided_regex"),
    ({"grammar": 'root ::= "a"', "structured_outputs": {"regex": "a"}}, "cannot be combined with grammar"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "'guided_json'"),
    ({"guided_json": "{"}, "'guided_json'"),
    ({"guided_json": 5}, "'guided_json'"),
    ({"guided_regex": "("}, "'guided_regex'"),
    ({"guided_choice": []}, "'guided_choice'"),
    ({"guided_choice": [1]}, "'guided_choice'"),
    ({"guided_grammar": "root ::= x"}, "'guided_grammar'"),
    ({"guided_grammar": "nonsense"}, "'guided_grammar'"),
    ({"structured_outputs": {}, "stop_token_ids": ["a"]}, "'stop_token_ids'"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "'structured_outputs'"),
    ({"structured_outputs": {"choice": [3]}}, "'structured_outputs.choice[0]'"),
    ({"structured_outputs": {"choice": "a"}}, "'structured_outputs.choice'"),
    ({"structured_outputs": {"regex": 1}}, "'structured_outputs.regex'"),
    ({"structured_outputs": {"structural_tag": "x"}}, "'structured_outputs.structural_tag'"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "x"}}, "'structured_outputs.whitespace_pattern'"),
    ({"min_tokens": -1}, "'min_tokens'"),
    ({"min_tokens": 25}, "'min_tokens': must be at most max_tokens, which is 24"),
    ({"allowed_token_ids": []}, "'allowed_token_ids'"),
    ({"allowed_token_ids": [512]}, "'allowed_token_ids'"),
    ({"allowed_token_ids": [-1]}, "'allowed_token_ids'"),
    ({"allowed_token_ids": [2], "min_tokens": 3}, "'allowed_token_ids': no token is left"),
    ({"allowed_token_ids": [300], "stop_token_ids": [300], "min_tokens": 3}, "'allowed_token_ids'"),
    ({"allowed_token_ids": [300], "ignore_eos": True, "logit_bias": {"300": False}}, "'allowed_token_ids'"),
    ({"bad_words": [""]}, "'bad_words[0]'"),
    ({"bad_words": "cat"}, "'bad_words'"),
    ({"truncate_prompt_tokens": 0}, "'truncate_prompt_tokens'"),
    ({"truncate_prompt_tokens": -2}, "'truncate_prompt_tokens'"),
    ({"truncation_side": "middle"}, "'truncation_side'"),
    ({"prompt_logprobs": -2}, "'prompt_logprobs'"),
    ({"prompt_logprobs": 1, "stream": True}, "'prompt_logprobs'"),
    ({"best_of": 2, "stream": True}, "'best_of'"),
    ({"n": 2, "best_of": 1}, "'best_of'"),
    ({"use_beam_search": True}, "'use_beam_search'"),
    ({"logits_processors": ["x"]}, "'logits_processors'"),
    ({"custom_logit_processor": "x"}, "'custom_logit_processor'"),
    ({"chat_template": "{{ x }}"}, "'chat_template'"),
    ({"guided_whitespace_pattern": " "}, "'guided_whitespace_pattern'"),
    ({"repetition_detection": {"min_count": 2}}, "'repetition_detection'"),
    ({"logprob_token_ids": [1]}, "'logprob_token_ids'"),
    ({"prompt_embeds": "AAAA"}, "'prompt_embeds'"),
    ({"image_data": [{"data": "AAAA", "id": 1}]}, "'image_data'"),
    ({"modalities": ["text", "audio"]}, "'modalities'"),
    ({"audio": {"voice": "x"}}, "'audio'"),
    ({"watermark": True}, "'watermark'"),
    ({"stop_regex": "a"}, "'stop_regex'"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_refusals(server: Any, fields: dict[str, Any], said: str) -> None:
    assert said in refusal(server, "/v1/completions", {"prompt": "a", **GREEDY, **fields})
    body = {"messages": [{"role": "user", "content": "a"}], **GREEDY, **fields}
    assert said in refusal(server, "/v1/chat/completions", body)


def test_field_without_effect_is_ignored(server: Any) -> None:
    plain = complete(server)
    for fields in (
        {"not_a_field": 1}, {"cache_salt": "x"}, {"request_id": "x"}, {"length_penalty": 1.0}, {"watermark": False},
        {"use_beam_search": False}, {"logits_processors": None}, {"structured_outputs": None}, {"guided_json": None},
        {"spaces_between_special_tokens": False}, {"skip_special_tokens": False}, {"stop_token_ids": [100_000]},
        {"min_tokens": 0}, {"bad_words": []}, {"modalities": ["text"]}, {"best_of": 1}, {"truncate_prompt_tokens": 999},
        {"prompt_logprobs": None}, {"include_stop_str_in_output": True}, {"guided_decoding_backend": "auto"},
    ):  # fmt: skip
        assert complete(server, **fields) == plain


def test_stop_tokens_end_the_answer(server: Any) -> None:
    ids = complete(server)["token_ids"]
    n = next(i for i in range(5, 20) if ids[i] not in ids[:i])
    texts = pieces(server, ids)
    for path, streamed in (("/v1/completions", False), ("/v1/completions", True)):
        body = {"prompt": PROMPT, **GREEDY, "stop_token_ids": [9999, ids[n]], "stream": streamed}
        for kept in (False, True):
            found = answer(server, path, body | {"include_stop_str_in_output": kept, "return_token_ids": True})
            assert found["text"] == "".join(texts[: n + kept])
            assert (found["finish_reason"], found["stop_reason"]) == ("stop", ids[n])
            assert found["token_ids"] == ids[: n + 1]
    native = server.post("/completion", {"prompt": PROMPT, **GREEDY, "stop_token_ids": [ids[n]], "return_tokens": True})
    assert (native["stop_type"], native["tokens"]) == ("eos", ids[: n + 1])
    told = complete(server, stop_token_ids=[ids[n]], logprobs=1)["logprobs"]
    assert len(told["tokens"]) == n  # those of the text


def answer(server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One choice, put together where it was streamed."""
    if not body.get("stream"):
        found: dict[str, Any] = server.post(path, body)["choices"][0]
        return found
    request = urllib.request.Request(server.url + path, json.dumps(body).encode())
    whole: dict[str, Any] = {"text": "", "token_ids": []}
    with urllib.request.urlopen(request, timeout=60) as reply:
        for line in reply.read().decode().split("\n\n"):
            if line in ("", "data: [DONE]"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            whole["text"] += choice.pop("text")
            whole["token_ids"] += choice.pop("token_ids", [])
            whole |= choice
    return whole


def test_stop_texts_are_kept_where_asked(server: Any) -> None:
    text = complete(server)["text"]
    stop = text[10:14]
    assert complete(server, stop=[stop])["text"] == text[: text.index(stop)]
    assert complete(server, stop=[stop], include_stop_str_in_output=True)["text"] == text[: text.index(stop) + 4]


def test_min_tokens_hold_back_every_end(server: Any) -> None:
    """The model wants to end at once; the tokens until it may are those of a request that never ends."""
    (eos,) = (i for i in range(3) if complete(server, logit_bias={str(i): 100})["finish_reason"] == "stop")
    eager = {"logit_bias": {str(eos): 100}, "max_tokens": 40}
    assert complete(server, **eager)["token_ids"] == [eos]
    for more in ({}, {"temperature": 1.5, "seed": 7}, {"repeat_penalty": 1.3}, {"speculative.type": "ngram-mod"}):
        on = complete(server, **eager, **more, ignore_eos=True)["token_ids"]
        found = complete(server, **eager, **more, min_tokens=9)
        assert found["token_ids"] == [*on[:9], eos], more
        assert found["finish_reason"] == "stop"
    on = complete(server)["token_ids"]
    found = complete(server, stop_token_ids=[on[2], on[20]], min_tokens=5)
    assert on[2] not in found["token_ids"][:5]
    assert len(found["token_ids"]) > 5
    text = complete(server)["text"]
    early, late = text[2:9], next(text[i : i + 4] for i in range(40, 60) if text.index(text[i : i + 4]) == i)
    assert complete(server, stop=[early, late], min_tokens=8)["text"] == text[: text.index(late)]


def test_bad_words_and_allowed_tokens(server: Any) -> None:
    plain = complete(server, max_tokens=40)
    word = plain["text"].split()[2]
    for more in ({}, {"speculative.type": "ngram-mod"}, {"temperature": 1.2, "seed": 3, "presence_penalty": 0.1}):
        assert word in complete(server, max_tokens=40, **more)["text"].split() or more
        for spelled in (word, f" {word}", f"{word} ", f"  {word} "):
            assert word not in complete(server, max_tokens=40, bad_words=[spelled], **more)["text"].split()
    allowed = sorted({*plain["token_ids"][::2], 300, 301})
    others = {str(id): False for id in range(512) if id not in allowed}
    for more in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "repeat_penalty": 1.5}):
        found = complete(server, allowed_token_ids=allowed, **more)
        assert set(found["token_ids"]) <= set(allowed)
        assert found == complete(server, logit_bias=others, **more)


def test_truncated_prompts(server: Any) -> None:
    ids = server.post("/tokenize", {"content": PROMPT * 4, "add_special": True})["tokens"]
    for n, side, kept in ((5, "left", ids[-5:]), (5, "right", ids[:5]), (-1, "left", ids), (1, "left", ids[-1:])):
        found = complete(server, prompt=PROMPT * 4, truncate_prompt_tokens=n, truncation_side=side)
        assert found["prompt_token_ids"] == kept
        assert found["text"] == complete(server, prompt=kept)["text"]
    long = "Lily went to the park. " * 300
    assert "exceeds" in refusal(server, "/v1/completions", {"prompt": long, "max_tokens": 4})
    found = complete(server, prompt=long, max_tokens=4, truncate_prompt_tokens=-1)
    assert len(found["prompt_token_ids"]) == server.get("/props")["default_generation_settings"]["n_ctx"] - 4
    bare = complete(server, prompt=PROMPT, add_special_tokens=False)["prompt_token_ids"]
    assert bare == server.post("/tokenize", {"content": PROMPT})["tokens"]


def test_log_probabilities_of_the_prompt(server: Any) -> None:
    ids = server.post("/tokenize", {"content": PROMPT, "add_special": True})["tokens"]
    (scored,) = server.post("/v1/score", {"input": PROMPT})["data"]
    for n, many in ((0, 1), (3, 4), (-1, 512)):
        told = complete(server, prompt_logprobs=n, max_tokens=1)["prompt_logprobs"]
        assert told[0] is None
        assert len(told) == len(ids)
        for id, entry, expected in zip(ids[1:], told[1:], scored["token_logprobs"][1:], strict=True):
            assert entry[str(id)]["logprob"] == pytest.approx(expected, abs=2e-3)
            assert len(entry) in (many, max(1, many - 1))
            ranks = {e["rank"]: e["logprob"] for e in entry.values() if e["rank"]}
            assert [ranks[rank] for rank in sorted(ranks)] == sorted(ranks.values(), reverse=True)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "prompt_logprobs": 1}
    said = server.post("/v1/chat/completions", {**chat, "return_token_ids": True})
    assert len(said["prompt_logprobs"]) == len(said["prompt_token_ids"]) == said["usage"]["prompt_tokens"]
    assert len(said["choices"][0]["token_ids"]) == 2


def test_ids_instead_of_texts(server: Any) -> None:
    found = complete(server, logprobs=2, return_tokens_as_token_ids=True)
    assert found["logprobs"]["tokens"] == [f"token_id:{id}" for id in found["token_ids"]]
    assert all(name.startswith("token_id:") for top in found["logprobs"]["top_logprobs"] for name in top)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    (choice,) = server.post("/v1/chat/completions", {**chat, "return_tokens_as_token_ids": True})["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{entry['id']}" for entry in choice["logprobs"]["content"]
    ]


def test_special_tokens_have_text_where_asked(server: Any) -> None:
    (eos,) = (i for i in range(3) if complete(server, logit_bias={str(i): 100})["finish_reason"] == "stop")
    ended = {"logit_bias": {str(eos): 100}, "min_tokens": 3}
    plain = complete(server, **ended)["text"]
    assert complete(server, **ended, skip_special_tokens=False)["text"] == plain  # the end is no part of the text
    kept = complete(server, **ended, skip_special_tokens=False, include_stop_str_in_output=True)["text"]
    assert kept == plain + server.post("/detokenize", {"tokens": [eos]})["content"]
    assert complete(server, **ended, include_stop_str_in_output=True)["text"] == plain
    bos = {"logit_bias": {"1": 200}, "max_tokens": 2}
    if eos != 1:
        assert complete(server, **bos)["text"] == ""
        assert complete(server, **bos, skip_special_tokens=False)["text"] == pieces(server, [1])[0] * 2


def test_the_penalty_of_vllm_has_no_window(server: Any) -> None:
    ours = {"repeat_penalty": 1.4, "repeat_last_n": -1}
    assert complete(server, repetition_penalty=1.4, max_tokens=90) == complete(server, **ours, max_tokens=90)
    assert complete(server, repetition_penalty=1.4, repeat_last_n=3) == complete(
        server, repeat_penalty=1.4, repeat_last_n=3
    )


def test_the_best_of_several_chats(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "seed": 4, "temperature": 1.3}
    each = server.post("/v1/chat/completions", {**body, "n": 4, "logprobs": True})["choices"]
    best = max(each, key=lambda c: sum(t["logprob"] for t in c["logprobs"]["content"]) / 6)
    (found,) = server.post("/v1/chat/completions", {**body, "best_of": 4})["choices"]
    assert found["message"] == best["message"]


def test_company_changes_nothing(server: Any) -> None:
    asked: list[dict[str, Any]] = [
        {"min_tokens": 12, "logit_bias": {"2": 50}},
        {"bad_words": ["there", "was"], "temperature": 1.0, "seed": 2},
        {"allowed_token_ids": list(range(259, 512)), "temperature": 1.0, "seed": 3},
        {"guided_regex": "[a-f ]{20}"},
        {"stop_token_ids": [290, 400], "min_tokens": 4},
    ]
    alone = [complete(server, **fields) for fields in asked]
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(lambda fields: complete(server, **fields), asked)) == alone


def test_remote_tokenizer_of_lm_eval_is_served(server: Any) -> None:
    """The calls that lm-eval's RemoteTokenizer makes, and the fields that it reads."""
    info = server.get("/tokenizer_info")
    assert (info["bos_token"], info["eos_token"], info["vocab_size"]) == ("<s>", "</s>", 512)
    assert "<|im_start|>" in info["chat_template"]
    ids = server.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False})["tokens"]
    assert ids == server.post("/tokenize", {"content": PROMPT})["tokens"]
    assert server.post("/detokenize", {"tokens": ids})["prompt"].strip() == PROMPT
    assert server.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})["tokens"] == [2]


def test_tokenize_counts_a_prompt_and_a_chat_as_vllm_does(server: Any) -> None:
    answer = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert answer["tokens"][0] == 1
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256  # -c 1024 in four slots
    assert "".join(answer["token_strs"][1:]).strip() == PROMPT
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    text = server.post("/apply-template", chat)["prompt"]
    counted = server.post("/tokenize", chat)
    assert counted["tokens"] == server.post("/tokenize", {"content": text})["tokens"]
    assert counted["token_strs"] is None
    assert "field 'prompt'" in refusal(server, "/tokenize", {"prompt": 3})
