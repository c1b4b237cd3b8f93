"""Migration page (docs/migration.md): each row that claims llama-server's behaviour, tried."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from logitless.cli.flags.flags import IGNORED, LATER, WORKS, CliError, Flag, UsageError, from_environment, parse
from logitless.cli.flags.options import SERVE
from logitless.cli.setup.model import model_options
from logitless.cli.setup.server import extra_settings
from logitless.engine.loading.drafting import spec_kinds
from logitless.engine.loading.options import ModelOptions
from logitless.engine.loading.placement import placement
from tests.helpers import llama_server_readme as readme
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


# The first table

FIRST = "Refused or different here, although valid there"


def first_table(kind: str) -> list[tuple[list[str], list[str]]]:
    """(command lines or requests, cells) of the rows of this kind."""
    return [(words(cells[0]), cells) for cells in rows(FIRST) if cells[-1].partition(":")[0].split()[0] == kind]


def refusal(line: str) -> str:
    """The line that ends a server with these flags."""
    argv = [word for word in re.split(r" (?=--)| ", line) if word]
    try:
        options = parse(FLAGS, argv, {})
        spec_kinds(model_options(options))
        extra_settings(options)
        placement(model_options(options))
    except (CliError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("line", [line for lines, _ in first_table("refused") for line in lines if line[0] == "-"])
def test_a_command_line_is_refused_by_its_flag(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    flags = re.findall(r"--[a-z-]+", line)
    told = refusal(line)
    assert any(flag in told for flag in flags) or "without a key" in told, told


def default(name: str) -> Any:
    return BY_NAME[name].default


ODD = '{"mcpServers":{"a":{"command":"x","y":1}}}'
DIFFERENT: dict[str, Callable[[], bool]] = {
    "--port": lambda: default("--port") == 8080,
    "--host": lambda: parse(FLAGS, ["--host", "::"], {}).host == "::",
    "--dry-penalty-last-n": lambda: default("--dry-penalty-last-n") == -1,
    "--ctx-checkpoints": lambda: default("--ctx-checkpoints") == 2,
    "--cache-ram": lambda: default("--cache-ram") is None,
    "--reasoning-preserve": lambda: default("--reasoning-preserve") is None,
    "--backend-sampling": lambda: default("--backend-sampling") is True,
    "--embedding": lambda: default("--embedding") is False,
    "--threads-batch": lambda: ModelOptions(threads=2, threads_batch=3).n_threads == 3,
    "--cpu-mask": lambda: parse(FLAGS, ["-C", "3"], {}).cpu_mask == {0, 1},
    "--cpu-range": lambda: parse(FLAGS, ["-Cr", "0-1"], {}).cpu_range == {0, 1},
    "--main-gpu": lambda: placement(ModelOptions(main_gpu=1, device=("cpu",)))[0] == ("cpu",),
    "--moe-cache-mib": lambda: placement(ModelOptions(moe_cache_mib=1, device=("cpu",)))[1].expert_cache == 1 << 20,
    "--split-mode": lambda: parse(FLAGS, ["-sm", "row"], {}).split_mode == "row",
    "--load-mode": lambda: parse(FLAGS, ["-lm", "dio"], {}).load_mode == "dio",
    "--numa": lambda: parse(FLAGS, ["--numa", "isolate"], {}).numa == "isolate",
    "--fit-target": lambda: default("--fit-target") == (),
    "--rpc": lambda: list(parse(FLAGS, ["--rpc", "h:1"], {}).rpc) == ["h:1"],
    "--cors-origins": lambda: default("--cors-origins") == "",
    "--cors-headers": lambda: default("--cors-headers") == ["*"],
    "--ui-config": lambda: parse(FLAGS, ["--ui-config", "{}"], {}).ui_config == {},
    "--ui-config-file": lambda: BY_NAME["--ui-config-file"].status == WORKS,
    "--ui-mcp-proxy": lambda: extra_settings(parse(FLAGS, ["--ui-mcp-proxy"], {}))["tools"].proxy,
    "--tools": lambda: "would see all of" in refusal("--tools all"),
    "--mcp-servers-config": lambda: BY_NAME["--mcp-servers-config"].status == WORKS,
    "--mcp-servers-json": lambda: (
        "is not known" in refusal('--mcp-servers-json={"mcpServers":{"a":{"command":"x","y":1}}}')
    ),
    "--log-prompts-dir": lambda: BY_NAME["--log-prompts-dir"].status == WORKS,
    "--draft-max": lambda: parse(FLAGS, ["--draft-max", "5"], {}).spec_draft_n_max == 5,
    "--draft-min": lambda: parse(FLAGS, ["--draft-min", "5"], {}).spec_draft_n_min == 5,
    "--slot-save-path": lambda: BY_NAME["--slot-save-path"].status == WORKS,
    "--ctx-size": lambda: ModelOptions(ctx_size=100_000).ctx_size == 100_000,
}


def test_each_different_flag_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    named = {line.split()[0] for lines, _ in first_table("different") for line in lines if line.startswith("--")}
    assert named == set(DIFFERENT)
    assert [name for name, holds in DIFFERENT.items() if not holds()] == []


@pytest.mark.parametrize("line", [line for lines, _ in first_table("accepted") for line in lines])
def test_a_flag_without_effect_is_named_by_the_line_at_the_start(line: str) -> None:
    options = parse(FLAGS, line.split(), {})
    assert options.notices == [line.split()[0]]
    assert vars(options) | {"notices": [], "given": [], "settled": set()} == vars(parse(FLAGS, [], {}))


def test_the_first_table_has_all_flags_without_effect() -> None:
    named = {line.split()[0] for lines, _ in first_table("accepted") for line in lines}
    silent = {"--jinja", "--check-tensors"}  # always so; the other way is refused
    for flag in FLAGS:
        if flag.status == IGNORED and not silent.intersection(flag.all_names):
            assert named.intersection((*flag.all_names, *flag.off_names)), flag.names
            named -= {*flag.all_names, *flag.off_names}
    assert not named


def test_the_first_table_has_all_flags_that_differ_or_are_not_here() -> None:
    lines = [line for cells in rows(FIRST) for line in words(cells[0])]
    flags = [BY_NAME[name] for line in lines for name in re.findall(r"(?<!\S)--[a-z-]+", line)]
    named = {name for flag in flags for name in (*flag.all_names, *flag.off_names)}
    elsewhere = {name for cells in rows("Flags") if "removed there" in cells[-1] for name in words(cells[0])}
    of_tables = {*flags_that_are("differs"), *flags_that_are("not here")} - elsewhere
    assert sorted(of_tables - named) == []


def test_the_first_table_has_all_endpoints_and_fields_that_differ() -> None:
    text = " ".join(cells[0] for cells in rows(FIRST))
    for heading in ("Endpoints", "Fields of requests"):
        for cells in rows(heading):
            if cells[-1].partition(":")[0] in ("differs", "not here"):
                for word in words(cells[0 if heading == "Endpoints" else 1]):
                    assert f"`{word}`" in text, word


# llama-server's README


def test_the_tables_have_all_of_the_readme() -> None:
    def named(heading: str, column: int) -> set[str]:
        return {word for cells in rows(heading) for word in words(cells[column])}

    assert set(readme.FLAGS) - named("Flags", 0) == set()
    assert {" ".join(name.split()) for name in readme.ENDPOINTS.split(",")} - named("Endpoints", 0) == set()
    assert {name for of in readme.FIELDS.values() for name in of.split()} - named("Fields of requests", 1) == set()
    assert set(readme.METRICS) - named("Metrics", 0) == set()


def test_flags_of_the_readme_are_taken_or_have_a_row() -> None:
    """`not here` is refused by name (below); every other one is parsed by a flag of that name."""
    elsewhere = set(flags_that_are("not here"))
    assert [name for name in readme.FLAGS if name not in elsewhere and name not in BY_NAME] == []


def test_values_of_the_readme_are_taken_or_have_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    refused = [(cells[0], " ".join(cells)) for cells in rows(FIRST) if cells[-1].startswith("refused")]
    for flag, value in ((flag, value) for flag, values in readme.VALUES.items() for value in values):
        if told := refusal(f"{flag} {value}"):
            assert any(flag in first and value in whole for first, whole in refused), (flag, value, told)


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
        given = [name, "1"] if flag is None or flag.takes_value else [name]
        with pytest.raises((CliError, UsageError), match=re.escape(name)):
            parse(FLAGS, given, {})


def test_flags_are_the_same() -> None:
    same_rows = [row for row in rows("Flags") if row[-1] == "same"]
    assert len(same_rows) > 150
    for names, variables, default, _ in same_rows:
        (flag,) = {id(f): f for f in (BY_NAME[name] for name in words(names))}.values()  # one, by all its names
        assert set(words(names)) <= {*flag.all_names, *flag.off_names}, names
        for variable in words(variables):
            text = sample(flag)
            value = text if flag.takes_value else True
            assert from_environment(flag, {variable: text}) == (variable, value), names
        if words(default):
            assert [shown(flag.default)] == words(default), names


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
def client(serve_here_module: ServerFactory, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """A server of the demo, with tokens for infill."""
    infill = ",".join(
        f"tokenizer.ggml.fim_{name}_token_id=int:{id}" for name, id in (("pre", 1), ("suf", 2), ("mid", 3))
    )
    folder = str(tmp_path_factory.mktemp("slots"))
    flags = ("--metrics", "--props", "-c", "512", "-n", "2", "--override-kv", infill, "--slot-save-path", folder)
    started = Client(serve_here_module(None, "--demo", *flags).url)
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


def test_requests_of_the_first_table(client: Client) -> None:
    """Each request that the table names; those of streams, tools, sounds and routers have tests of their own."""

    def status(path: str, **body: Any) -> int:
        return client.ask("POST", path, body).status

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    chat = "/v1/chat/completions"
    assert status(chat) == status(chat, messages=[]) == 400
    assert status(chat, messages=[{"role": "user", "content": [image]}]) == 400
    assert status("/v1/systemone") == 404
    for more in ({"echo": True}, {"best_of": 2}, {"suffix": "b"}):
        client.post("/v1/completions", **more)
    cut = client.post("/v1/responses", max_output_tokens=1)
    assert cut["status"] == "incomplete"
    reply = client.post(chat, logprobs=True, top_logprobs=1, max_tokens=4, temperature=2.0, seed=3)
    for token in reply["choices"][0]["logprobs"]["content"]:
        assert token["token"] in [top["token"] for top in token["top_logprobs"]]
    whole = client.post("/completion", n_predict=8, n_probs=1, ignore_eos=True)
    assert len(whole["completion_probabilities"]) == whole["tokens_predicted"] == 8
    for method, path in (("GET", "/tools"), ("POST", "/tools"), ("GET", "/cors-proxy"), ("POST", "/cors-proxy")):
        assert client.ask(method, path, {} if method == "POST" else None).status == 403
    for method, path in (("GET", "/models/sse"), ("POST", "/models/load"), ("POST", "/models"), ("DELETE", "/models")):
        assert client.ask(method, path, {} if method == "POST" else None).status in (404, 405)


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
    for path in words(endpoint):
        if path == "/rerank":
            continue  # this model has no head for it: below
        body = {} if path == "/embedding" else body_of(path)
        answers = [client.ask("POST", path, {**body, field: value}) for value in NONSENSE]
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
        if here.startswith("same:"):
            continue  # of drafts: tests/server/test_endpoints.py
        assert here == "same"
        for name in words(names):
            assert re.search(rf"^llamacpp:{name} [\d.e+-]+$", text, re.MULTILINE), name


def test_the_counterparts_of_ollama_are_flags() -> None:
    for _, here in rows("Coming from Ollama"):
        for name in (word for word in words(here) if word.startswith("--")):
            assert BY_NAME[name].status != LATER
