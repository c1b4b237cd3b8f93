"""Batches of a real server that is killed, and of the command line."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

from logitless.engine.loading.open_model import demo_model
from logitless.engine.records.store import Store
from tests.helpers.commands import command
from tests.integration.conftest import ClientFactory, ServerFactory

FLAGS = ("--demo", "-np", "4", "--alias", "demo")
N = 60
LINES = [
    {
        "custom_id": f"r{i}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"ROMEO {i}:", "max_tokens": 24, "temperature": 0},
    }
    for i in range(N)
]
CONTENT = "".join(json.dumps(line) + "\n" for line in LINES)


def asked(log: str) -> list[int]:
    """Numbers of the lines that were answered, by the access log."""
    return [int(n) for n in re.findall(r"POST /v1/completions 200 request_id=batch_\w+-(\d+) ", log)]


def texts(rows: str) -> dict[str, str]:
    told = [json.loads(row) for row in rows.splitlines()]
    assert len({row["custom_id"] for row in told}) == len(told)
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in told}


def test_a_killed_server_does_no_line_twice(serve: ServerFactory, connect: ClientFactory, tmp_path: Path) -> None:
    server = serve(None, *FLAGS, "--data-dir", str(tmp_path))
    api = connect(f"{server.url}/v1", "none")
    file = api.files.create(file=("lines.jsonl", CONTENT.encode()), purpose="batch").id
    made = api.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
    counts: Any = None
    while counts is None or counts.completed < 5:
        counts = api.batches.retrieve(made.id).request_counts
    server.process.send_signal(signal.SIGKILL)
    server.ended()
    store = Store(tmp_path)
    kept = store.lines_done(made.id)
    store.close()
    assert counts.completed <= len(kept) < N
    server = serve(None, *FLAGS, "--data-dir", str(tmp_path))
    api = connect(f"{server.url}/v1", "none")
    while (done := api.batches.retrieve(made.id)).status in ("in_progress", "finalizing"):
        time.sleep(0.01)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": N, "completed": N, "failed": 0}
    assert done.output_file_id is not None
    answers = texts(api.files.content(done.output_file_id).text)
    assert len(answers) == N
    body: Any = LINES[7]["body"]
    assert answers["r7"] == api.completions.create(model="demo", **body).choices[0].text
    server.process.terminate()
    second = asked(server.ended())
    assert sorted(second) == sorted(set(range(N)) - kept)


def test_the_command_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text("".join(json.dumps(line) + "\n" for line in [*LINES[:6], {**LINES[6], "body": {"prompt": 1.5}}]))

    def run(*words: str) -> tuple[int, str]:
        got = command("batch", *words, "-m", str(demo_model()), "-t", "1")
        return got.returncode, got.stderr.decode().splitlines()[-1]

    assert run(str(lines), "-o", str(out)) == (1, f"{out}: 6 of 7 requests answered, 1 failed")
    rows = out.read_text().splitlines(keepends=True)
    answered = texts("".join(row for row in rows if json.loads(row)["response"]["status_code"] == 200))
    assert set(answered) == {f"r{i}" for i in range(6)}
    out.write_text("".join(rows[:3]) + rows[3][:50])  # killed while it wrote the fourth
    code, said = run(str(lines), "-o", str(out))
    assert re.fullmatch(r".*: \d of 7 requests answered, [01] failed, 3 were answered before", said)
    assert code in (0, 1)
    again = out.read_text().splitlines(keepends=True)
    assert again[:3] == rows[:3]
    assert texts("".join(row for row in again if json.loads(row)["response"]["status_code"] == 200)) == answered
    lines.write_text(json.dumps(LINES[9]))
    assert run(str(lines), "-o", str(out))[1].endswith("has answers of another file, as of 'r0'")
    lines.write_text("[]")
    assert run(str(lines), "-o", str(out)) == (1, f"logitless: {lines}: line 1: is no JSON object")
    assert run("-o", str(out)) == (2, "logitless: batch: FILE and -o FILE are required")


def test_embeddings_of_a_batch_are_those_of_requests(
    serve_here: ServerFactory, connect: ClientFactory, tmp_path: Path
) -> None:
    server = serve_here(None, *FLAGS, "--embedding", "--data-dir", str(tmp_path))
    api = connect(f"{server.url}/v1", "none")
    inputs: list[Any] = ["ROMEO:", ["JULIET:", "NURSE:"], 5]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": {"model": "demo", "input": given}}
        for i, given in enumerate(inputs)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = api.files.create(file=("lines.jsonl", content), purpose="batch").id
    made = api.batches.create(input_file_id=file, endpoint="/v1/embeddings", completion_window="24h")
    while (done := api.batches.retrieve(made.id)).status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.01)
    assert done.output_file_id
    assert done.error_file_id
    answers = [json.loads(row) for row in api.files.content(done.output_file_id).text.splitlines()]
    told = {row["custom_id"]: [one["embedding"] for one in row["response"]["body"]["data"]] for row in answers}
    for i in range(2):
        expected = api.embeddings.create(model="demo", input=inputs[i], encoding_format="float").data
        assert told[str(i)] == [one.embedding for one in expected]
    (wrong,) = map(json.loads, api.files.content(done.error_file_id).text.splitlines())
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("2", 400)
