"""Data checks and "auto" hyperparameters on the web page: equal to the server's."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from logitless.engine.finetuning.hyperparameters import resolved
from logitless.engine.finetuning.hyperparameters import resolved_rewards as reinforced
from logitless.server.ui.page import version
from logitless.training.config import job_row
from tests.helpers.browser import Browser, Tab
from tests.helpers.http_fakes import running

GOOD = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
CHECKS = [  # lines, errors, a part of the notes
    ([CHAT] * 60, [], "60 chats."),
    ([CHAT, CHAT], [], "1 row is there more than once."),
    ([GOOD], [], "Fewer than 10 rows"),
    ([GOOD, CHAT], ["several kinds"], ""),
    ([], ["no rows"], ""),
    (["{"], ["Line 1 is no JSON"], ""),
    ([[1]], ["is no JSON object"], ""),
    ([{"x": 1}], ["needs “messages”"], ""),
    ([{"prompt": "a"}], ["must be strings"], ""),
    ([{"prompt": "a", "completion": " "}], ["is empty"], ""),
    ([{"text": 1}], ["must be a string"], ""),
    ([{"messages": []}], ["must be a list"], ""),
    ([{"messages": [{"content": "a"}]}], ["messages[0] has no role"], ""),
    ([{"messages": [{"role": "user", "content": "a"}]}], ["no message of the assistant"], ""),
]


PAIR = {"prompt": "a", "chosen": "bc", "rejected": "d"}
ASK = {"messages": [{"role": "user", "content": "a"}], "answer": "b"}
CHOSEN = {"messages": [{"role": "user", "content": "a"}]}
METHODS = [  # method, line, a part of the error, "" for none, characters of the longest part
    ("dpo", PAIR, "", 3),
    ("simpo", {"input": CHOSEN, "preferred_output": [], "non_preferred_output": CHOSEN["messages"]}, "", 14),
    ("orpo", GOOD, "is one of prompts with completions; the method learns from pairs", 0),
    ("dpo", {**PAIR, "chosen": 1}, "needs a prompt and two answers", 0),
    ("supervised", PAIR, "is one of pairs", 0),
    ("kto", {**GOOD, "label": True}, "", 2),
    ("kto", PAIR, "", 3),
    ("kto", {**GOOD, "label": "yes"}, "true or false", 0),
    ("reinforcement", ASK, "", 7),
    ("reinforcement", {"prompt": "abc"}, "", 3),
    ("reinforcement", CHAT, "prompts end with the user’s", 0),
    ("supervised", {"conversations": [{"from": "gpt", "value": "a"}]}, "", 28),
]


@pytest.fixture
async def module(browser: Browser) -> AsyncIterator[Tab]:
    async with running() as server, browser.tab() as tab:
        await tab.open(server.url + "/")
        await tab.run(
            f"import('{server.url}/ui/{version()}/tune_data.js').then(m => {{ globalThis.data = m; return 0; }})"
        )
        yield tab


async def test_checks_of_data(module: Tab) -> None:
    for lines, errors, note in CHECKS:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        told = await module.run(
            f"(f => ({{errors: data.mostErrors(f.errors), notes: f.notes}}))(data.checked({json.dumps(text)}, true))"
        )
        assert len(told["errors"]) == len(errors), (text, told)
        assert all(part in line for part, line in zip(errors, told["errors"], strict=True)), told
        assert note in " ".join(told["notes"]), told
    many = await module.run("data.mostErrors(data.checked('x\\n'.repeat(30), true).errors)")
    assert many[-1] == "… and 22 more."


async def test_rows_of_methods(module: Tab) -> None:
    for method, line, error, longest in METHODS:
        told = await module.run(f"data.checked({json.dumps(json.dumps(line))}, true, {json.dumps(method)})")
        assert [one["text"] for one in told["errors"]] == ([told["errors"][0]["text"]] if error else []), told
        assert error in "".join(one["text"] for one in told["errors"])
        assert error or told["rows"][0]["longest"] == longest, told
    chosen = [await module.run(f"data.methodFor({json.dumps(json.dumps(line))})") for _, line, _, _ in METHODS]
    assert chosen[:3] == ["dpo", "dpo", "supervised"]
    assert chosen[5] == "kto"


async def test_auto_of_rewards_is_what_the_server_chooses(module: Tab) -> None:
    for n in (1, 5, 8, 60, 700):
        for longest, n_ctx in ((5, 512), (300, 400)):
            for asked in ({}, {"n_samples": 4, "n_updates": 2}, {"batch_size": 3, "max_completion_tokens": 9}):
                found = job_row(reinforced(asked, n, longest, n_ctx))
                told = await module.run(f"data.automaticRewards({n}, {longest}, {n_ctx}, {json.dumps(asked)})")
                del told["steps"]
                assert told == {name: found[name] for name in told}, (n, longest, asked)


async def test_auto_is_what_the_server_chooses(module: Tab) -> None:
    draw = random.Random(7)
    cases: list[tuple[list[int], int, dict[str, Any]]] = []
    for n in (1, 3, 20, 33, 34, 250, 1250, 9000):
        lengths = [draw.randrange(1, draw.choice((10, 300, 3000))) for _ in range(n)]
        cases += [(lengths, 2048, {}), (lengths, 256, {"n_epochs": 2}), (lengths, 4096, {"batch_size": 7})]
    for lengths, n_ctx, asked in cases:
        found = job_row(resolved(asked, np.array(lengths, np.int32), max(lengths) + 1, n_ctx))
        told = await module.run(f"data.automatic({lengths}, {max(lengths) + 1}, {n_ctx}, {json.dumps(asked)})")
        del told["steps"]
        assert told == {name: found[name] for name in told}, (len(lengths), asked)
