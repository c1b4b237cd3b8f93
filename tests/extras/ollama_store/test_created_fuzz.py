"""Random requests to create, copy, upload and delete models: answers or refusals, and files at their places alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.extras.ollama_store.test_created_models import House, gguf, routing
from tests.helpers.fuzz import examples

NAMES = (
    "a",
    "b",
    "b:x",
    "u/c:y",
    "base",
    "a:latest",
    "nobody",
    "",
    "../a",
    "/etc/passwd",
    "a/../b",
    ".blobs",
    "a\0",
    "é",
)
ODD = (
    None,
    True,
    0,
    -1,
    1e308,
    2**70,
    "",
    "\ud800",
    "\0",
    "x\ny",
    "../../x",
    "{{ 1",
    [],
    {},
    [None],
    {"a": None},
    [[[]]],
)
SETTINGS: dict[str, tuple[Any, ...]] = {
    "from": ("base", "a", "b:x"),
    "system": ("You are.", "\ud800 x", "x" * 5000),
    "template": (
        "{{ .Prompt }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ .X }}",
        "\ud800{{ .Prompt }}",
    ),
    "parameters": ({"temperature": 0.5, "stop": ["a"]}, {"num_ctx": 64, "seed": -5}, {"x": 1}, {"stop": "\ud800"}),
    "messages": ([{"role": "user", "content": "\ud800"}], [{"role": "system", "content": "a"}], [{"role": 1}]),
    "license": ("MIT", ["a", "b"]),
    "quantize": ("q4_0", "q8_0", "q99", "q4_0\n"),
    "stream": (True, False),
    "modelfile": ("FROM base", ""),
}


@st.composite
def bodies(draw: Any, digests: list[str]) -> Any:
    """Mostly a request that may be right, with a few fields that are odd."""
    if draw(st.integers(0, 15)) == 0:
        return draw(st.sampled_from(ODD))
    body: dict[str, Any] = {"model": draw(st.sampled_from([*NAMES[:4] * 4, *NAMES]))}
    if draw(st.integers(0, 3)):
        body["from"] = draw(st.sampled_from(SETTINGS["from"]))
    uploads = {name: st.sampled_from([*digests, "sha256:x", "../x"]) for name in ("m.gguf", "../b")}
    for name in draw(st.lists(st.sampled_from([*SETTINGS, "files", "adapters", "source", "destination"]), max_size=4)):
        if name in ("files", "adapters"):
            body[name] = draw(st.fixed_dictionaries({}, optional=uploads))
        else:
            body[name] = draw(st.sampled_from(SETTINGS.get(name, NAMES)))
    if draw(st.integers(0, 3)) == 0:
        body[draw(st.sampled_from([*body, "parameters", "name"]))] = draw(st.sampled_from(ODD))
    return body


def test_requests(tmp_path: Path) -> None:
    folder, outside = tmp_path / "models", tmp_path / "outside"
    base = gguf(folder / "base.gguf").read_bytes()
    outside.mkdir()
    files = [gguf(outside / "m.gguf"), gguf(outside / "a.gguf", "adapter"), gguf(outside / "p.gguf", "mmproj")]
    digests = [f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    seen: Counter[tuple[str, int]] = Counter()
    before = sorted(tmp_path.rglob("*"))

    async def one(house: House, method: str, path: str, body: Any) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with house.session.request(method, house.url + path, data=raw) as reply:
            text = (await reply.read()).decode()
            seen[path.partition("/sha")[0], reply.status] += 1
            assert reply.status in (200, 201, 400, 404, 413), (path, body, text)
        lines = [json.loads(line) for line in text.splitlines()] if method != "HEAD" else []
        for line in lines:
            assert "\n" not in line.get("error", ""), (body, text)
            assert str(tmp_path) not in text, (body, text)
            assert "internal" not in line.get("error", ""), (body, text)

    def check() -> None:
        assert (folder / "base.gguf").read_bytes() == base
        assert [path for path in sorted(tmp_path.rglob("*")) if folder not in path.parents] == [
            folder,
            outside,
            *files_of(outside),
        ]
        for path in folder.iterdir():
            assert path.name in ("base.gguf", ".blobs") or (path / "created.json").is_file(), path
        assert not list(folder.glob(".blobs/*.part"))

    def files_of(place: Path) -> list[Path]:
        return [path for path in before if place in path.parents]

    with asyncio.Runner() as runner:
        routed = routing(folder)
        house = runner.run(routed.__aenter__())
        for path, digest in zip(files, digests, strict=True):
            assert runner.run(house.upload(path)) == digest
        places = (
            "/api/create",
            "/api/create",
            "/api/create",
            "/api/copy",
            "/api/delete",
            f"/api/blobs/{digests[0]}",
            "/api/blobs/x",
        )

        @settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
        @given(path=st.sampled_from(places), body=bodies(digests) | st.binary(max_size=20))
        def send(path: str, body: Any) -> None:
            methods = {"/api/delete": "DELETE"}
            runner.run(one(house, methods.get(path, "POST"), path, body))
            check()

        try:
            send()
            runner.run(one(house, "POST", "/api/create", {"model": "last", "from": "base"}))
            assert "last" in house.fleet.models
        finally:
            runner.run(routed.__aexit__(None, None, None))
    print(dict(sorted(seen.items())))  # shown by -s
