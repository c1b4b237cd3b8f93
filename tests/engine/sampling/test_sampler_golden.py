"""Sampling against llama.cpp's recorded requests, token by token, on logits of a numpy llama."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from logitless.engine.runner.step_inputs import SamplingFeeds, room_of, sampling_feeds
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sampling.sampler import RowSampler, split_log_probs, split_probs
from logitless.graph.ops.sampling import sample
from logitless.graph.ops.sampling import samplers as s
from logitless.models.gguf.file import GGUFFile
from logitless.models.tokenizer import Tokenizer, from_metadata
from tests.helpers import sampling_kernel
from tests.helpers.paths import DATA

MODELS = ("stories260K", "prometheus-shakespeare-2.3M-F32")
EXPECTED = {
    "stories260K": "stories260K.gguf.json",
    "prometheus-shakespeare-2.3M-F32": "prometheus-shakespeare-2.3M-F32.gguf.json",
}


class Llama:
    """A llama of F32 weights in numpy, one sequence: tokens in, logits of the last one out; remembers K and V."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.w = {t.name: np.asarray(t.data) for t in reader.tensors}

        def key(name: str, default: float) -> float:
            result = reader.get_field(f"llama.{name}")
            return default if result is None else result.contents()

        self.n_layer, self.n_head = int(key("block_count", 0)), int(key("attention.head_count", 0))
        self.n_head_kv = int(key("attention.head_count_kv", 0))
        self.eps = np.float32(key("attention.layer_norm_rms_epsilon", 1e-5))
        self.base = float(key("rope.freq_base", 10000.0))
        self.cache: list[tuple[np.ndarray, np.ndarray]] = []

    def reset(self) -> None:
        self.cache = []

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.square(x, dtype=np.float64).mean(-1, keepdims=True)
        return (x / np.sqrt(mean + self.eps)).astype(np.float32) * self.w[name]

    def rope(self, x: np.ndarray, start: int) -> np.ndarray:  # (tokens, heads, head_dim), pairs lie side by side
        d = x.shape[-1]
        angle = (start + np.arange(len(x)))[:, None, None] * self.base ** (-np.arange(0, d, 2) / d)
        even, odd, cos, sin = x[..., ::2], x[..., 1::2], np.cos(angle), np.sin(angle)
        return np.stack((even * cos - odd * sin, even * sin + odd * cos), -1).reshape(x.shape).astype(np.float32)

    def logits(self, tokens: list[int]) -> np.ndarray:
        w, n = self.w, len(tokens)
        x = w["token_embd.weight"][tokens]
        start = len(self.cache[0][0]) if self.cache else 0
        for i in range(self.n_layer):
            b = f"blk.{i}."
            h = self.norm(x, b + "attn_norm.weight")
            q = (h @ w[b + "attn_q.weight"].T).reshape(n, self.n_head, -1)
            k = (h @ w[b + "attn_k.weight"].T).reshape(n, self.n_head_kv, -1)
            v = (h @ w[b + "attn_v.weight"].T).reshape(n, self.n_head_kv, -1)
            q, k = self.rope(q, start), self.rope(k, start)
            if start:
                k, v = (np.concatenate(pair) for pair in zip(self.cache[i], (k, v), strict=True))
            self.cache[i : i + 1] = [(k, v)]
            group = self.n_head // self.n_head_kv
            score = np.einsum("thd,shd->hts", q, k.repeat(group, 1)) / np.sqrt(np.float32(q.shape[-1]))
            score = np.where(np.arange(start + n) > start + np.arange(n)[:, None], -np.inf, score)
            p = np.exp(score - score.max(-1, keepdims=True))
            p = (p / p.sum(-1, keepdims=True)).astype(np.float32)
            x = x + np.einsum("hts,shd->thd", p, v.repeat(group, 1)).reshape(n, -1) @ w[b + "attn_output.weight"].T
            h = self.norm(x, b + "ffn_norm.weight")
            gate = h @ w[b + "ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[b + "ffn_up.weight"].T)) @ w[b + "ffn_down.weight"].T
        out = self.norm(x[-1:], "output_norm.weight")
        logits: np.ndarray = (out @ w.get("output.weight", w["token_embd.weight"]).T).astype(np.float32)
        return logits  # (1, V)


@functools.cache
def load(data: Path, model: str) -> tuple[Llama, Tokenizer, dict[str, dict], list[int]]:
    path = data / "models" / f"{model}.gguf"
    with GGUFFile.open(path) as file:
        tokenizer = from_metadata(file.metadata)
    cases = json.loads((data / "expected" / f"sampling-{model}.json").read_text())["cases"]
    prompt = json.loads((data / "expected" / EXPECTED[model]).read_text())["prompt_ids"]
    return Llama(path), tokenizer, {case["case"]: case for case in cases}, prompt


def params_of(request: dict, tokenizer: Tokenizer) -> SamplingParams:
    fields = {k: v for k, v in request.items() if k in SamplingParams.__struct_fields__}
    bias = [(id, -np.inf if value is False else value) for id, value in fields.pop("logit_bias", [])]
    if request.get("ignore_eos"):
        bias += [(id, -np.inf) for id in sorted(tokenizer.eog_ids)]
    if "samplers" in fields:
        fields["samplers"] = tuple(fields["samplers"])
    return SamplingParams(**fields, logit_bias=tuple(bias))


def generate(data: Path, model: str, name: str, *, reference: bool) -> tuple[list[int], list[int], list[tuple]]:
    """Our tokens, the recorded ones, and what the ops said about probabilities at each."""
    llama, tokenizer, cases, prompt = load(data, model)
    request, response = cases[name]["request"], cases[name]["response"]
    params = params_of(request, tokenizer)
    sampler, room = RowSampler(params, tokenizer, 2048), room_of(sampling_feeds(1, 4096))
    feeds = SamplingFeeds(room)
    sampler.begin(prompt)
    llama.reset()
    state = np.zeros((2, s.N_STATE), np.float32)
    n_probs = params.n_probs if params.post_sampling_probs else 0
    tokens: list[int] = []
    said: list[tuple] = []
    ask = prompt
    for _ in response["tokens"]:
        logits = llama.logits(ask)
        feeds.write([sampler.feeds()], [1])
        arrays = [logits, state, *room.values()]
        if reference:
            out = sample.sample.reference(*arrays, n_probs=n_probs)
        else:
            out = sampling_kernel.run("sample", arrays, n_probs=n_probs)
        if n_probs:
            said.append(tuple(part[0] for part in split_probs(out, n_probs)))
        elif params.n_probs:
            sources = [logits, out, np.array([-1], np.int32)]
            if reference:
                probs = sample.log_probs.reference(*sources, n=params.n_probs)
            else:
                probs = sampling_kernel.run("log_probs", sources, n=params.n_probs)
            said.append(tuple(part[0] for part in split_log_probs(probs, params.n_probs)))
        tokens.append(sampler.accept(out[0, 0]))
        ask = tokens[-1:]
    return tokens, response["tokens"], said


def case_names() -> list[str]:
    path = DATA / "expected" / f"sampling-{MODELS[0]}.json"
    if not path.exists():
        return ["defaults"]
    return [case["case"] for case in json.loads(path.read_text())["cases"] if case["case"] != "grammar"]


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
@pytest.mark.parametrize("name", case_names())
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_llama_cpps(shared_data: Path, model: str, name: str, reference: bool) -> None:
    ours, theirs, _ = generate(shared_data, model, name, reference=reference)
    assert ours == theirs


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_are_llama_cpps(shared_data: Path, model: str, reference: bool) -> None:
    _, _, said = generate(shared_data, model, "n_probs", reference=reference)
    expected = load(shared_data, model)[2]["n_probs"]["response"]["completion_probabilities"]
    for (value, ids, values), want in zip(said, expected, strict=True):
        assert value == pytest.approx(want["logprob"], abs=2e-5)
        assert ids.tolist() == [top["id"] for top in want["top_logprobs"]]
        assert values.tolist() == pytest.approx([top["logprob"] for top in want["top_logprobs"]], abs=5e-5)


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
@pytest.mark.parametrize("model", MODELS)
def test_probabilities_after_sampling_are_llama_cpps(shared_data: Path, model: str, reference: bool) -> None:
    _, _, said = generate(shared_data, model, "post-sampling probs", reference=reference)
    expected = load(shared_data, model)[2]["post-sampling probs"]["response"]["completion_probabilities"]
    for (count, chosen, ids, values), want in zip(said, expected, strict=True):
        n = len(want["top_probs"])
        assert chosen == pytest.approx(want["prob"], rel=2e-5)
        assert ids[:n].tolist() == [top["id"] for top in want["top_probs"]]
        assert values[:n].tolist() == pytest.approx([top["prob"] for top in want["top_probs"]], rel=2e-5)
        assert (ids[n:] == -1).all()
        assert n == len(ids) or n == count
