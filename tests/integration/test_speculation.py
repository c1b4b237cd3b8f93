"""Speculative decoding through the real port: the same texts and probabilities in fewer steps."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.helpers.commands import command
from tests.helpers.paths import MODELS

MODEL, DRAFT = MODELS / "stories260K.gguf", MODELS / "stories260K-conv-Q8_0.gguf"
PROMPT = "Once upon a time there was a little girl named Lily. Once upon"
SHORT = ("--spec-ngram-simple-size-n", "3", "--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k4v-size-n", "2")
SIZES = (*SHORT, "--spec-ngram-map-k4v-size-m", "3", "--spec-ngram-mod-n-match", "3", "--spec-ngram-mod-n-min", "1")
KINDS = ("draft-simple", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
HOT = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0},
    HOT,
    {"temperature": 0.8, "repeat_penalty": 1.2, "dry_multiplier": 0.8},
    {"temperature": 1.2, "xtc_probability": 0.5, "xtc_threshold": 0.05, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 5, "typical_p": 0.7},
    {"samplers": ["top_k", "top_p", "infill"], "top_p": 0.95, "min_p": 0},
    {"mirostat": 2},
]


@pytest.fixture(scope="module")
def server(serve_here_module: Any) -> Any:
    if not (MODEL.exists() and DRAFT.exists()):
        pytest.skip(f"no {MODEL.name} beside the checkout")
    flags = ("-c", "2048", "-md", str(DRAFT), "--draft-max", "5", "--no-spec-draft-adapt", "--metrics")
    return serve_here_module(MODEL, *flags, *SIZES)


def ask(server: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "n_predict": 40, "return_tokens": True, "cache_prompt": False, **fields}
    answer: dict[str, Any] = server.post("/completion", body)
    return answer


def seen(answer: dict[str, Any]) -> tuple[Any, ...]:
    names = ("content", "tokens", "stop_type", "tokens_cached", "tokens_predicted")
    return *(answer[name] for name in names), answer.get("completion_probabilities")


def of_sampler(seed: int) -> dict[str, Any]:
    return {**SAMPLERS[seed], "seed": seed, "n_probs": 2 * (seed % 2), "post_sampling_probs": seed == 3}


@pytest.fixture(scope="module")
def plain_answers(server: Any) -> list[dict[str, Any]]:
    return [ask(server, **of_sampler(seed)) for seed in range(len(SAMPLERS))]


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_same_with_every_kind(server: Any, plain_answers: list[dict[str, Any]], kind: str) -> None:
    n_drafted = n_accepted = 0
    for seed, plain in enumerate(plain_answers):
        fields = of_sampler(seed)
        drafted = ask(server, **fields, **{"speculative.type": kind})
        assert seen(drafted) == seen(plain), fields
        assert "draft_n" not in plain["timings"]
        n_drafted += drafted["timings"].get("draft_n", 0)
        n_accepted += drafted["timings"].get("draft_n_accepted", 0)
    assert n_drafted >= n_accepted > 0


def n_steps(server: Any) -> int:
    lines = server.get("/metrics").splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith("llamacpp:n_decode_total "))))


def test_a_draft_model_that_agrees_saves_steps(server: Any) -> None:
    before = n_steps(server)
    fields = {**HOT, "seed": 5, "n_predict": 60, "speculative.type": "draft-simple"}
    answer = ask(server, **fields)
    timings = answer["timings"]
    assert timings["draft_n_accepted"] > 0.7 * timings["draft_n"]  # the same model but for its weights' type
    assert n_steps(server) - before < 20
    for p_min, n_most in ((0.0, 5), (0.5, 5), (0.0, 2)):
        limited = ask(server, **fields, **{"speculative.p_min": p_min, "speculative.n_max": n_most})
        assert seen(limited) == seen(answer)
    sure = ask(server, **fields, **{"speculative.p_min": 0.6})["timings"]
    assert 0 < sure["draft_n"] < timings["draft_n"]
    greedy = ask(server, temperature=0, **{"speculative.type": "draft-simple", "speculative.p_min": 0.6})["timings"]
    assert greedy["draft_n_accepted"] > 0.6 * greedy["draft_n"] > 0


def test_several_draft_at_once(server: Any) -> None:
    prompts = [PROMPT, "The dog", "One day a boy", PROMPT + " a"]
    body = {"prompt": prompts, "n_predict": 50, "seed": 3, **HOT}
    plain = server.post("/completion", body)
    for kinds in ("draft-simple", "ngram-mod,draft-simple", "ngram-cache"):
        answers = server.post("/completion", {**body, "speculative.type": kinds})
        assert [a["content"] for a in answers] == [a["content"] for a in plain]
        assert all(a["timings"]["draft_n_accepted"] > 0 for a in answers)
    assert any(slot["speculative"] for slot in server.get("/slots"))


def test_prediction_through_openai_s_client(server: Any, connect: Any) -> None:
    client = connect(f"{server.url}/v1")
    settings: Any = {"model": "any", "messages": [{"role": "user", "content": PROMPT}], "seed": 4, "max_tokens": 80}
    plain = client.chat.completions.create(**settings)
    text = plain.choices[0].message.content
    assert text is not None
    before = n_steps(server)
    predicted = client.chat.completions.create(**settings, prediction={"type": "content", "content": text})
    assert predicted.choices == plain.choices
    assert n_steps(server) - before <= 12
    assert predicted.usage is not None
    details = predicted.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 60
    assert details.rejected_prediction_tokens is not None
    edited: Any = {"type": "content", "content": [{"type": "text", "text": text[:40] + " cat" + text[40:]}]}
    stream = client.chat.completions.create(
        **settings, prediction=edited, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert (usage.completion_tokens_details.accepted_prediction_tokens or 0) > 20
    assert (usage.completion_tokens_details.rejected_prediction_tokens or 0) > 0
    completion = client.completions.create(model="any", prompt=PROMPT, seed=4, max_tokens=40, logprobs=2)
    drafted = client.completions.create(
        model="any", prompt=PROMPT, seed=4, max_tokens=40, logprobs=2,
        extra_body={"prediction": {"type": "content", "content": completion.choices[0].text}},
    )  # fmt: skip
    assert drafted.choices == completion.choices


def test_drafted_tokens_with_echo_stops_and_several_results(server: Any) -> None:
    plain = ask(server, **HOT, seed=9)
    before = n_steps(server)
    drafted = ask(server, **HOT, seed=9, draft_tokens=plain["tokens"])
    assert seen(drafted) == seen(plain)
    assert n_steps(server) - before == 1
    assert drafted["timings"]["draft_n_accepted"] == 39
    stop = plain["content"][20:26]
    assert seen(ask(server, **HOT, seed=9, stop=[stop], draft_tokens=plain["tokens"])) == seen(
        ask(server, **HOT, seed=9, stop=[stop])
    )
    body = {"prompt": PROMPT, "max_tokens": 30, "seed": 9, "n": 3, "echo": True, "logprobs": 2, **HOT}
    drafted, plain = (server.post("/v1/completions", {**body, **d}) for d in ({"draft_tokens": plain["tokens"]}, {}))
    assert drafted["choices"] == plain["choices"]


def test_a_client_that_speculates_itself(server: Any) -> None:
    """A whole text by calls of /v1/verify with drafts of its own equals the text of one request."""
    fields: dict[str, Any] = {**HOT, "xtc_probability": 0.3, "seed": 11, "n_probs": 1}
    plain = ask(server, **fields, n_predict=30)
    prompt = server.post("/tokenize", {"content": PROMPT, "add_special": True})["tokens"]
    tokens: list[int] = []
    probs: list[Any] = []
    rng, slot = [0, 0], -1
    while len(tokens) < 30:
        guess = plain["tokens"][len(tokens) : len(tokens) + 4] or [1]
        if len(tokens) % 3 == 0:
            guess[-1] = 7  # now and then a wrong one
        body = {**fields, "draft_tokens": guess, "rng_used": rng}
        if len(tokens) % 2 and slot >= 0:
            reply = server.post("/v1/verify", {**body, "id_slot": slot})
        else:
            reply = server.post("/verify", {**body, "prompt": prompt + tokens})
        assert reply["tokens"][:-1] == guess[: reply["n_accepted"]]
        tokens += reply["tokens"]
        probs += reply["completion_probabilities"]
        rng, slot = reply["rng_used"], reply["id_slot"]
        if reply["stop_type"] == "eos":
            break
    assert tokens[:30] == plain["tokens"]
    assert probs[:30] == plain["completion_probabilities"]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--spec-type", "draft-simple"], 1, ["--model-draft"]),
        (["--spec-type", "telepathy"], 2, ["telepathy", "--spec-type"]),
        (["--spec-type", "draft-mtp"], 1, ["draft-mtp", "no block that predicts"]),
        (["--spec-type", "draft-eagle3"], 1, ["draft-eagle3", "needs --model-draft"]),
        (["--spec-type", "draft-dspark"], 2, ["draft-dspark"]),
        (
            ["-md", str(MODELS / "prometheus-shakespeare-2.3M-F32.gguf")],
            1,
            ["--model-draft", "prometheus-shakespeare-2.3M-F32.gguf"],
        ),
        (["-md", "/no/such.gguf"], 1, ["/no/such.gguf"]),
    ],
)
def test_file_that_cannot_draft_is_refused(flags: list[str], code: int, words: list[str]) -> None:
    if not MODEL.exists():
        pytest.skip(f"no {MODEL.name} beside the checkout")
    got = command("serve", "-m", str(MODEL), "--port", "0", *flags)
    told = got.stderr.decode()
    assert got.returncode == code, told
    assert told.startswith("logitless: ")
    assert told.count("\n") == 1
    assert all(word in told for word in words), told


@pytest.mark.parametrize("temperature", [0, 3.0])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("drafts", ["none", "draft-simple"])
def test_the_chosen_token_is_among_the_likeliest_that_a_chat_shows(
    server: Any, connect: Any, temperature: float, n: int, drafts: str
) -> None:
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "seed": 5}
    asked |= {"temperature": temperature, "n": n, "logprobs": True, "extra_body": {"speculative": {"type": drafts}}}
    client = connect(server.url)
    for top in (1, 3):
        whole = client.chat.completions.create(**asked, top_logprobs=top)
        parts = list(client.chat.completions.create(**asked, top_logprobs=top, stream=True))
        choices = [choice for answer in (whole, *parts) for choice in answer.choices if choice.logprobs]
        entries = [entry for choice in choices for entry in choice.logprobs.content or []]
        assert len(entries) > 12 * n
        for entry in entries:
            assert len(entry.top_logprobs) == top
            assert (entry.token, entry.logprob) in [(each.token, each.logprob) for each in entry.top_logprobs]


def plan(*flags: str) -> CompletedProcess[bytes]:
    return command("plan", "-m", str(MODEL), "-c", "512", *flags)


@pytest.mark.skipif(not (MODEL.exists() and DRAFT.exists()), reason="no models beside the checkout")
def test_a_plan_counts_the_model_that_drafts() -> None:
    report = json.loads(plan("-md", str(DRAFT), "-ctkd", "f32", "--json").stdout)
    (cpu,), (drafts,) = report["devices"], report["draft"]["devices"]
    assert report["draft"]["model"] == str(DRAFT)
    assert drafts["weights"] < cpu["weights"]  # of 8 bits, not 32
    assert 1.4 * cpu["kv"] < drafts["kv"] < 1.6 * cpu["kv"]  # keys of 32 bits, and values as they were
    assert report["total"] == report["process"] + cpu["total"] + drafts["total"]
    assert f"{DRAFT}, which drafts:" in plan("-md", str(DRAFT)).stdout.decode()


@pytest.mark.skipif(not MODEL.exists(), reason="no model beside the checkout")
def test_a_plan_refuses_what_cannot_draft_for_the_model() -> None:
    other = MODELS / "prometheus-shakespeare-2.3M-F32.gguf"
    said = plan("-md", str(other))
    assert (said.returncode, said.stderr.count(b"\n")) == (1, 1)
    assert said.stderr.decode().startswith(f"logitless: --model-draft {other}: its vocabulary")


def test_head_learns_between_requests(serve_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitless.engine.loading.open_model.cache_folder", lambda: tmp_path)
    server = serve_here(MODEL, "-c", "512", "--spec-learn", "--no-spec-draft-adapt")
    got = want = ask(server, temperature=0, **{"speculative.type": "none"})
    while got["timings"].get("draft_n_accepted", 0) < 20:
        got = ask(server, temperature=0, **{"speculative.type": "draft-learn"})
        assert seen(got) == seen(want)
