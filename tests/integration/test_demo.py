"""Demo model: `serve` without a model and without downloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from logitless.models.chat.template import ChatTemplate
from logitless.models.gguf.file import GGUFFile
from tests.helpers.paths import ROOT
from tests.integration.conftest import ClientFactory, ServerFactory

DEMO = ROOT / "models" / "demo" / "shakespeare.gguf"


@pytest.mark.usefixtures("hub_cache")  # which is empty
def test_the_demo_speaks(serve: ServerFactory, connect: ClientFactory, shared_data: Path) -> None:
    assert DEMO.stat().st_size < 4 << 20
    with GGUFFile.open(DEMO) as gguf:
        assert gguf.metadata["general.name"] == "logitless demo"
    server = serve(None, "-t", "1")
    assert any("serving the demo" in line for line in server.log)
    assert server.get("/v1/models")["data"][0]["id"] == "shakespeare"
    text = (shared_data / "corpora" / "tinyshakespeare.txt").read_text()[20000:20200]
    score = server.post("/v1/score", {"input": text})["data"][0]
    assert score["loss"] == pytest.approx(1.3, abs=0.3)  # nats a byte; guessing is 5.6
    api = connect(f"{server.url}/v1")
    messages = [{"role": "user", "content": "What light through yonder window breaks?"}]
    reply = api.chat.completions.create(model="any", messages=messages, max_tokens=80, temperature=0)  # type: ignore[arg-type]
    words = (reply.choices[0].message.content or "").lower().split()
    known = set((shared_data / "corpora" / "tinyshakespeare.txt").read_text().lower().split())
    assert len(words) > 8
    assert sum(word in known for word in words[:-1]) > 0.8 * len(words[:-1])


def test_an_answer_of_the_demo_begins_where_its_prompt_ends() -> None:
    """Jinja drops the line break after a block: a finetune would learn answers that no prompt asks for."""
    with GGUFFile.open(DEMO) as gguf:
        template = ChatTemplate(str(gguf.metadata["tokenizer.chat_template"]), bos_token="", eos_token="")
    asked = [{"role": "user", "content": "Who comes?"}]
    prompt = template.render(asked)
    assert prompt == "JULIET:\nWho comes?\n\nROMEO:\n"
    answered = [*asked, {"role": "assistant", "content": "A bear."}]
    assert template.render(answered, add_generation_prompt=False) == prompt + "A bear.\n\n"
