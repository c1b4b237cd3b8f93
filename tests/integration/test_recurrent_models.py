"""Recurrent models through the port: batches, resumed prompts, slot files, refused features."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.architecture_specs import PLAIN
from tests.helpers.commands import command
from tests.helpers.reference_model import write

CHAT = [{"role": "user", "content": "Tell me of rivers and of rain. " * 4}]


@pytest.fixture(scope="module", params=["qwen35", "mamba2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("states") / "m.gguf"
    write(made, replace(PLAIN[request.param], n_vocab=512, vocabulary=True, n_ctx_train=1024))
    return made


def test_chats_in_company(serve_here: Any, connect: Any, path: Path) -> None:
    url = serve_here(path, "-c", "4096", "-np", "3", "-kvu", "--ctx-checkpoints", "3").url
    client = connect(f"{url}/v1")

    def answer(chat: list[dict[str, str]], **more: Any) -> Any:
        return client.chat.completions.create(
            model="m", messages=chat, max_tokens=16, temperature=0.8, seed=4, logprobs=True, **more
        )

    def told(reply: Any) -> list[tuple[str, float]]:
        return [(token.token, token.logprob) for token in reply.choices[0].logprobs.content]

    chats = [[{"role": "user", "content": f"{i}. {CHAT[0]['content']}"}] for i in range(6)]
    alone = [told(answer(chat)) for chat in chats]
    with ThreadPoolExecutor(6) as threads:
        assert [told(reply) for reply in threads.map(answer, chats)] == alone
    first = answer(CHAT)
    longer = [*CHAT, {"role": "assistant", "content": first.choices[0].message.content}, *CHAT]
    whole = answer(longer, extra_body={"cache_prompt": False})
    again = answer(longer)
    assert told(again) == told(whole)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    draft = [{"type": "content", "content": whole.choices[0].message.content}]
    assert told(answer(longer, prediction=draft[0])) == told(whole)


def test_feature_without_recurrent_support_is_refused(serve_here: Any, path: Path) -> None:
    server = serve_here(path, "-c", "512")
    with pytest.raises(Exception, match="400"):
        server.post("/completion", {"prompt": "rain", "n_cache_reuse": 4})
    got = command("serve", "-m", str(path), "--port", "0", "--context-shift")
    assert got.returncode == 1
    assert (
        got.stderr.decode().splitlines()[-1].startswith("logitless: --context-shift: this model's layers keep states")
    )
