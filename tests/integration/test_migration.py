"""Migration page (docs/migration.md): each row that claims llama-server's behaviour, tried."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from logitless.cli.flags.flags import IGNORED, LATER, WORKS, CliError, Flag, UsageError, from_environment, parse
from logitless.cli.flags.options import SERVE
from tests.helpers.http_fakes import N_CTX, FakeTokenizer, running
from tests.helpers.paths import ROOT
from tests.integration.conftest import ServerFactory

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
FLAGS = [flag for group in SERVE for flag in group.flags]
BY_NAME = {name: flag for flag in FLAGS for name in (*flag.all_names, *flag.off_names)}


def rows(heading: str) -> list[list[str]]:
    """The cells of a section's table."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert lines, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def same(heading: str) -> list[tuple[str, str]]:
    """(first word, word) of the rows that claim equality: the names in the first cell but one, of what is first."""
    return [(cells[0], word) for cells in rows(heading) if cells[-1] == "same" for word in words(cells[1])]


# Flags


def flags_that_are(status: str) -> list[str]:
    return [name for cells in rows("Flags") if cells[-1].partition(":")[0] == status for name in words(cells[0])]


def test_every_row_says_what_it_is() -> None:
    known = {"same", "accepted", "differs", "not here"}
    for heading in ("Flags", "Endpoints", "Fields of requests", "Fields of replies", "Metrics"):
        for cells in rows(heading):
            assert cells[-1].partition(":")[0] in known, cells
            assert words(cells[0])


@pytest.mark.parametrize(("status", "means"), [("same", WORKS), ("differs", WORKS), ("accepted", IGNORED)])
def test_flags_are_known(status: str, means: str) -> None:
    for name in flags_that_are(status):
        assert BY_NAME[name].status == means, name


def test_every_flag_without_effect_has_a_row() -> None:
    named = {name for cells in rows("Flags") for name in words(cells[0])}
    unnamed = [flag.names for flag in FLAGS if flag.status in (IGNORED, LATER) and not named.issuperset(flag.all_names)]
    assert unnamed == []


def test_flags_that_are_not_here_are_refused_by_name() -> None:
    names = flags_that_are("not here")
    assert len(names) > 12
    for name in names:
        flag = BY_NAME.get(name)
        if flag is not None and name in flag.off_names:
            continue  # it asks for nothing
        given = [name, "x"] if flag is None or flag.takes_value else [name]
        with pytest.raises((CliError, UsageError), match=re.escape(name)):
            parse(FLAGS, given, {})


@pytest.mark.parametrize("cells", [row for row in rows("Flags") if row[-1] == "same"], ids=lambda row: row[0])
def test_a_flag_is_the_same(cells: list[str]) -> None:
    names, variables, default, _ = cells
    (flag,) = {id(f): f for f in (BY_NAME[name] for name in words(names))}.values()  # one, by all its names
    assert set(words(names)) <= {*flag.all_names, *flag.off_names}
    for variable in words(variables):
        text = sample(flag)
        assert from_environment(flag, {variable: text}) == (variable, text if flag.takes_value else True)
    if words(default):
        (wanted,) = words(default)
        assert shown(flag.default) == wanted


def sample(flag: Flag) -> str:
    return "1" if flag.takes_value else "on"


def shown(default: Any) -> str:
    if isinstance(default, bool) or default is None:
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, int | float) else str(default)


# Endpoints and fields

SAID = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any] | list[Any]] = {
    "/completion": {"prompt": "x", "n_probs": 1},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": SAID},
    "/v1/chat/completions/control": {"id": "x", "action": "reasoning_end"},
    "/v1/chat/completions/input_tokens": {"messages": SAID},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": SAID, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [97]},
    "/apply-template": {"messages": SAID},
    "/v1/embeddings": {"input": "x"},
    "/rerank": {"query": "x", "documents": ["a", "b"]},
    "/v1/streams/lookup": {"conversation_ids": []},
    "/lora-adapters": [],
    "/slots/0?action=save": {"filename": "a.bin"},
    "/slots/0?action=restore": {"filename": "a.bin"},
    "/api/show": {"model": "shakespeare"},
    "/props": {},
}
ALIASES = {
    "/completions": "/completion",
    "/chat/completions": "/v1/chat/completions",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
    "/embedding": "/v1/embeddings",
    "/embeddings": "/v1/embeddings",
    "/reranking": "/rerank",
    "/v1/rerank": "/rerank",
    "/v1/reranking": "/rerank",
}
NONSENSE: tuple[Any, ...] = ({"?": 1}, [{"?": 1}], "?", -1e300, True, ["?"])  # no field takes all of these


class Answer(NamedTuple):
    status: int
    body: Any


class Client:
    """JSON requests to a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return Answer(status, json.loads(text) if text.startswith(("{", "[")) else text)

    def post(self, path: str, **more: Any) -> Any:
        body = body_of(path)
        answer = self.ask("POST", path, {**body, **more} if more else body)
        assert answer.status == 200, (path, answer)
        return answer.body


def body_of(path: str) -> Any:
    return BODIES[ALIASES.get(path, path)]


@pytest.fixture(scope="module")
def client(serve_module: ServerFactory, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """A server of the demo, with tokens for infill."""
    infill = ",".join(
        f"tokenizer.ggml.fim_{name}_token_id=int:{id}" for name, id in (("pre", 1), ("suf", 2), ("mid", 3))
    )
    folder = str(tmp_path_factory.mktemp("slots"))
    flags = ("--metrics", "--props", "-c", "512", "-n", "2", "--override-kv", infill, "--slot-save-path", folder)
    started = Client(serve_module(None, "--demo", *flags).url)
    for slot in range(4):
        started.post("/completion", id_slot=slot)
    return started


ENDPOINTS = [
    (*name.split(" ", 1), words(reply))
    for names, reply, here in rows("Endpoints")
    if here == "same"
    for name in words(names)
]


@pytest.mark.parametrize(("method", "path", "fields"), [row for row in ENDPOINTS if "rerank" not in row[1]])
def test_an_endpoint_is_the_same(client: Client, method: str, path: str, fields: list[str]) -> None:
    body = body_of(path) if method == "POST" and "erase" not in path else None
    status, reply = client.ask(method, path, body)
    assert status == 200, reply
    item = reply[0] if isinstance(reply, list) and reply else reply
    assert set(fields) <= set(item), set(fields) - set(item)


async def test_reranking_is_the_same() -> None:
    async with running(tokenizer=RankTokenizer(), embedder=FakeEmbedder(), pooling="rank") as server:
        for method, path, fields in ENDPOINTS:
            if "rerank" in path:
                assert method == "POST"
                status, reply = await server.post(path, body_of(path))
                assert (status, set(reply)) == (200, set(fields))


class RankTokenizer(FakeTokenizer):
    vocab: ClassVar = SimpleNamespace(add_bos=True, add_sep=False, add_eos=True)
    sep_id = None


class FakeEmbedder:
    """One score for each text."""

    n_ctx, default, ranks, template = N_CTX, "rank", True, ""

    def groups(self, texts: Any, apart: Any) -> Iterator[list[int]]:
        yield list(range(len(texts)))

    def embed(self, texts: Any, pooling: str, choice: Any, media: Any) -> list[Any]:
        return [np.ones(1, np.float32) for _ in texts]


def test_endpoints_that_are_not_here_are_refused(client: Client) -> None:
    for names, _, here in rows("Endpoints"):
        if here.startswith("not here"):
            for method, path in (name.split() for name in words(names)):
                status, reply = client.ask(method, path, {} if method == "POST" else None)
                assert str(status) in here
                assert reply["error"]["code"] == status


@pytest.mark.parametrize(("endpoint", "field"), same("Fields of requests"))
def test_a_field_is_read(client: Client, endpoint: str, field: str) -> None:
    """A value that it cannot have is refused by its name, where an unknown field would be ignored."""
    (path,) = words(endpoint)
    if path == "/rerank":
        return  # this model has no head for it: below
    answers = [client.ask("POST", path, {**body_of(path), field: value}) for value in NONSENSE]
    assert any(status == 400 and field in reply["error"]["message"] for status, reply in answers), answers


async def test_a_field_of_reranking_is_read() -> None:
    async with running(tokenizer=RankTokenizer(), embedder=FakeEmbedder(), pooling="rank") as server:
        for endpoint, field in same("Fields of requests"):
            if words(endpoint) == ["/rerank"]:
                status, reply = await server.post("/rerank", {**body_of("/rerank"), field: {"?": 1}})
                assert status == 400
                assert field in reply["error"]["message"]


def test_unknown_fields_are_ignored(client: Client) -> None:
    for path in BODIES:
        if isinstance(body_of(path), dict) and path not in ("/rerank", "/slots/0?action=restore"):
            client.post(path, no_such_field={"?": 1})


def test_fields_that_are_not_here_are_refused(client: Client) -> None:
    prompt = {"prompt_string": "x", "multimodal_data": ["aGk="]}
    status, reply = client.ask("POST", "/completion", {"prompt": prompt})
    assert status == 400
    assert "multimodal_data" in reply["error"]["message"]


def objects(client: Client) -> dict[str, Any]:
    """An example of each object, by what the page calls it."""
    whole, model = client.post("/completion"), client.ask("GET", "/v1/models").body["data"][0]
    with urllib.request.urlopen(
        urllib.request.Request(
            f"{client.url}/completion",
            json.dumps({**body_of("/completion"), "stream": True, "return_progress": True}).encode(),
            {"Content-Type": "application/json"},
        ),
        timeout=60,
    ) as stream:
        first = json.loads(stream.readline().removeprefix(b"data: "))
    return {
        "`timings`": whole["timings"],
        "`usage`": client.post("/v1/completions")["usage"],
        "`prompt_progress`": first["prompt_progress"],
        "`completion_probabilities`": whole["completion_probabilities"][0],
        "`completion_probabilities` of `post_sampling_probs`": client.post("/completion", post_sampling_probs=True)[
            "completion_probabilities"
        ][0],
        "`next_token` of a slot": client.ask("GET", "/slots").body[0]["next_token"][0],
        "model of `/v1/models`": model,
        "`meta` of a model": model["meta"],
        "`error`": client.ask("POST", "/completion", {"prompt": 5}).body["error"],
        "`error` of a long prompt": client.ask("POST", "/completion", {"prompt": "x" * 600}).body["error"],
        "`generation_settings`": whole["generation_settings"],
    }


def test_objects_have_the_same_fields(client: Client) -> None:
    found = objects(client)
    for name, fields, here in rows("Fields of replies"):
        assert here == "same"
        assert set(words(fields)) <= set(found[name]), name


def test_metrics_are_the_same(client: Client) -> None:
    text = client.ask("GET", "/metrics").body
    for names, here in rows("Metrics"):
        assert here == "same"
        for name in words(names):
            assert re.search(rf"^llamacpp:{name} [\d.e+-]+$", text, re.MULTILINE), name


def test_the_counterparts_of_ollama_are_flags() -> None:
    for _, here in rows("Coming from Ollama"):
        for name in words(here) if "--" in here else ():
            assert BY_NAME[name].status != LATER
