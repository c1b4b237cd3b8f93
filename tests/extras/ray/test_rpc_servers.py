"""Replica whose model lies on rpc-servers, by hand: `pytest --ray tests/extras/ray/test_rpc_servers.py`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from openai import APIError, OpenAI

from logitless import LLM, SamplingParams
from tests.helpers.ray_fleet import actors, fleet, until

PROMPT = "Once upon a time there was a little girl named Lily"


def test_a_replica_and_its_rpc_servers_are_replaced_when_one_of_them_dies(
    request: pytest.FixtureRequest, shared_data: Path, tmp_path: Path
) -> None:
    if not request.config.getoption("--ray"):
        pytest.skip("--ray is not given")
    path = str(shared_data / "models" / "stories260K.gguf")
    with LLM(path, ctx_size=256) as llm:
        expected = llm.generate(PROMPT, SamplingParams(max_tokens=30, temperature=0)).text
    model = {
        "model": path,
        "num_cpus": 0.5,
        "options": {"ctx_size": 1024, "threads": 1, "gpu_layers": "all"},
        "rpc_servers": {"n": 2, "num_cpus": 0.5, "strategy": "PACK"},
    }

    def answer(client: OpenAI) -> str:
        return client.completions.create(model="", prompt=PROMPT, max_tokens=30, temperature=0).choices[0].text

    with fleet({"models": [model]}, tmp_path, 18_461) as client:
        assert answer(client) == expected
        replicas, servers = actors(b"ServeReplica:logitless:stories260K"), actors(b"ray::_Server")
        assert len(replicas) == 1
        assert len(servers) == 2
        os.kill(servers[0], signal.SIGKILL)

        def replaced() -> bool:
            new = actors(b"ServeReplica:logitless:stories260K"), actors(b"ray::_Server")
            return len(new[0]) == 1 and len(new[1]) == 2 and not {*new[0], *new[1]} & {*replicas, *servers}

        until(replaced)

        def answers() -> bool:
            try:
                return answer(client) == expected
            except APIError:
                return False

        until(answers)
    assert not actors(b"ray::_Server")
