"""Router through the real port, with children that serve real models."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.browser import Browser

KEY = "sesame"
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def router(serve_module: Any, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")
    for name in ("a", "b"):
        shutil.copy(shared_data / "models" / "stories260K-conv-Q8_0.gguf", folder / f"{name}.gguf")
    (folder / "broken.gguf").write_text("no model")
    presets = tmp_path_factory.mktemp("presets") / "presets.ini"
    presets.write_text("[a]\nalias = first\n")
    flags = (
        "--models-dir",
        str(folder),
        "--models-preset",
        str(presets),
        "--models-max",
        "1",
        "--api-key",
        KEY,
        "-c",
        "4096",
        "-t",
        "1",
        "--metrics",
    )
    return serve_module(None, *flags, "--data-dir", str(tmp_path_factory.mktemp("data")))


@pytest.fixture
def client(router: Any, connect: Any) -> openai.OpenAI:
    made: openai.OpenAI = connect(f"{router.url}/v1", KEY)
    return made


def status(client: openai.OpenAI, name: str) -> Any:
    return next(model.status for model in client.models.list().data if model.id == name)  # type: ignore[attr-defined]


def wait(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # a look is a request, which takes the children's cores


def children(router: Any) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(router.process.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split() if _is_child(int(pid))]


def _is_child(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"logitless.cli.commands.router_child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def say(client: openai.OpenAI, model: str, **kwargs: Any) -> Any:
    return client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=8, **kwargs)


def test_models_are_loaded_by_name_and_make_room(router: Any, client: openai.OpenAI) -> None:
    first = say(client, "a")
    assert first.model == "a"
    assert status(client, "a")["value"] == "loaded"
    (meta,) = (model.meta for model in client.models.list().data if model.id == "a")  # type: ignore[attr-defined]
    assert (meta["n_vocab"], meta["n_ctx_train"]) == (512, 512)
    metrics = client._client.get(f"{router.url}/metrics", headers=client.auth_headers).text.splitlines()
    assert {"llamacpp:tokens_predicted_total 8.0", 'llamacpp:tokens_predicted_total{model="a"} 8.0'} <= {*metrics}
    assert "logitless:models_loaded 1.0" in metrics
    second = say(client, "b")
    assert not hasattr(next(model for model in client.models.list().data if model.id == "a"), "meta")
    assert (second.model, second.choices[0].text) == ("b", first.choices[0].text)
    assert (status(client, "a")["value"], status(client, "b")["value"]) == ("unloaded", "loaded")
    assert len(children(router)) == 1
    pieces = [chunk.choices[0].text for chunk in say(client, "b", stream=True) if chunk.choices]
    assert "".join(pieces) == first.choices[0].text
    assert len(pieces) > 4
    chat = client.chat.completions.create(model="b", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert chat.usage is not None


def test_keys_are_the_routers_and_a_child_is_closed_to_all_others(router: Any, client: openai.OpenAI) -> None:
    say(client, "b")
    with pytest.raises(openai.AuthenticationError):
        say(client.with_options(api_key="wrong"), "b")
    listening = router.line(r"^\[b\] .*listening on")
    child = client.with_options(base_url=listening.split()[-1] + "/v1")
    with pytest.raises(openai.AuthenticationError):
        say(child, "b")
    shown = client.models.list().model_dump_json() + "".join(router.log)
    assert KEY not in shown


def test_a_client_that_leaves_ends_its_request_in_the_child(router: Any, client: openai.OpenAI) -> None:
    with client.completions.create(model="b", prompt=PROMPT, max_tokens=900, stream=True) as stream:
        next(iter(stream))
    slots = client.with_options(base_url=router.url)
    wait(lambda: not any(s["is_processing"] for s in slots.get("/slots?model=b", cast_to=list[Any])))


def test_request_that_no_model_serves_is_refused(router: Any, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"model '\.\./a' not found"):
        say(client, "../a")
    with pytest.raises(openai.BadRequestError, match="model name is missing"):
        say(client, "")
    headers = {"Content-Encoding": "gzip", **client.auth_headers}
    for path in ("/completion?model=b", "/models/load", "/models"):
        request = urllib.request.Request(router.url + path, b"no gzip", headers)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request, timeout=60)
    with pytest.raises(openai.InternalServerError, match=r"could not be loaded: .*broken.gguf: is not a GGUF file"):
        say(client, "broken")
    assert status(client, "broken")["failed"] is True
    assert status(client, "broken")["exit_code"] == 1
    with pytest.raises(openai.BadRequestError, match="is not loaded"):
        say(client, "a", extra_query={"autoload": "false"})
    props = client.with_options(base_url=router.url).get("/props", cast_to=dict[str, Any])
    assert (props["role"], props["max_instances"]) == ("router", 1)
    assert router.get("/health") == {"status": "ok"}
    assert "<!doctype html>" in router.get("/").lower()


def test_requests_that_name_no_model_are_answered(router: Any, client: openai.OpenAI) -> None:
    plain = client.with_options(base_url=router.url)
    with client._client.stream("GET", f"{router.url}/models/sse", headers=client.auth_headers) as changes:
        name = "a" if status(client, "a")["value"] != "loaded" else "b"
        answer = client.responses.create(model=name, input="hi", max_output_tokens=4)
        told = []
        for line in changes.iter_lines():
            if line.startswith("data: "):
                told.append(json.loads(line[6:]))
                if told[-1] == {"model": name, "event": "status_change", "data": {"status": "loaded"}}:
                    break
    assert {"model": name, "event": "model_status", "data": {"status": "loading"}} in told
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    talk = client.conversations.create(items=[{"type": "message", "role": "user", "content": "Hello"}])
    behind = client.responses.create(
        model=name, input="hi", max_output_tokens=400, background=True, conversation=talk.id
    )
    assert behind.status == "queued"
    events = list(client.responses.retrieve(behind.id, stream=True, starting_after=1))
    assert [event.sequence_number for event in events] == list(range(2, len(events) + 2))
    assert client.responses.retrieve(behind.id).status == events[-1].response.status == "incomplete"  # type: ignore[union-attr]
    assert [item.type for item in client.conversations.items.list(talk.id)] == ["message"] * 3
    assert client.responses.cancel(behind.id).status == "incomplete"
    assert client.conversations.delete(talk.id).deleted
    headers = {"X-Conversation-Id": "talk"}
    whole = [c.choices[0].text for c in say(client, name, stream=True, extra_headers=headers) if c.choices]
    again = client._client.get(f"{router.url}/v1/stream/talk", headers=client.auth_headers).text
    frames = [json.loads(line[6:]) for line in again.splitlines() if line.startswith("data: {")]
    assert [frame["choices"][0]["text"] for frame in frames if frame["choices"]] == whole
    ids = {"conversation_ids": ["talk", "other"]}
    (found,) = plain.post("/v1/streams/lookup", body=ids, cast_to=list[Any])
    assert (found["conversation_id"], found["is_done"]) == ("talk", True)
    plain.delete("/v1/stream/talk", cast_to=type(None))
    assert plain.post("/v1/streams/lookup", body=ids, cast_to=list[Any]) == []


def test_files_and_jobs_belong_to_all_models(client: openai.OpenAI) -> None:
    rows = "".join(json.dumps({"prompt": PROMPT, "completion": f" cat {i} sang."}) + "\n" for i in range(4))
    with pytest.raises(openai.BadRequestError, match="line 1: is not valid JSON"):
        client.files.create(file=("bad.jsonl", b"{"), purpose="fine-tune")
    file = client.files.create(file=("rows.jsonl", rows.encode()), purpose="fine-tune")
    assert client.files.content(file.id).text == rows
    with pytest.raises(openai.NotFoundError, match="'c' not found"):
        client.fine_tuning.jobs.create(model="c", training_file=file.id)
    wanted: Any = {"n_epochs": 500, "batch_size": 2, "context_length": 32}
    job = client.fine_tuning.jobs.create(model="a", training_file=file.id, hyperparameters=wanted)
    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    say(client, "b")  # takes the only place
    assert client.fine_tuning.jobs.resume(job.id).status == "queued"
    assert status(client, "a")["value"] == "loaded"
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    once = wanted | {"n_epochs": 1}
    job = client.fine_tuning.jobs.create(model="first", training_file=file.id, hyperparameters=once)  # an alias of a
    assert job.model == "a"
    url = f"{client.base_url}fine_tuning/jobs/{job.id}/events?stream=true"
    with client._client.stream("GET", url, headers=client.auth_headers, timeout=60) as events:
        messages = [json.loads(line[6:])["message"] for line in events.iter_lines() if line.startswith("data: {")]
    assert messages[-1] == "The job has successfully completed"
    done = client.fine_tuning.jobs.retrieve(job.id)
    assert done.fine_tuned_model is not None
    assert done.fine_tuned_model in {model.id for model in client.models.list()}
    assert client.models.retrieve(done.fine_tuned_model).parent == "a"  # type: ignore[attr-defined]
    assert say(client, done.fine_tuned_model).model == done.fine_tuned_model
    job = client.fine_tuning.jobs.create(model=done.fine_tuned_model, training_file=file.id, hyperparameters=once)
    wait(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded")
    name = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert name is not None
    assert say(client, name).model == name
    assert client.models.delete(name).deleted  # by its server
    with pytest.raises(openai.NotFoundError):
        say(client, name)
    say(client, "b")  # takes the only place
    assert client.models.delete(done.fine_tuned_model).deleted
    assert not [model.id for model in client.models.list() if model.id.startswith("ft:")]
    with pytest.raises(openai.BadRequestError, match="is succeeded, so it cannot be queued"):
        client.fine_tuning.jobs.resume(job.id)
    assert client.files.delete(file.id).deleted


def test_a_child_that_is_killed_is_told_and_started_again(router: Any, client: openai.OpenAI) -> None:
    text = say(client, "a").choices[0].text
    (pid,) = children(router)
    body = {"ignore_eos": True}
    with client.completions.create(model="a", prompt=PROMPT, max_tokens=3900, stream=True, extra_body=body) as stream:
        next(iter(stream))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="ended while it answered"):
            list(stream)
    wait(lambda: "exit_code" in status(client, "a"))
    assert status(client, "a")["exit_code"] == -signal.SIGKILL
    assert say(client, "a").choices[0].text == text
    assert status(client, "a") == {**status(client, "a"), "value": "loaded"}
    assert "failed" not in status(client, "a")


async def test_the_page_tells_how_models_are_and_loads_them(
    router: Any, client: openai.OpenAI, browser: Browser
) -> None:
    here, other = ("b", "a") if status(client, "b")["value"] == "loaded" else ("a", "b")
    say(client, here)
    async with browser.tab() as page:
        await page.look(1280, 800)
        await page.open(router.url + "/")
        await page.run(f"sessionStorage.setItem('logitless-key', '{KEY}'); true")
        await page.open_page(router.url)
        await page.until(f"$('model')?.selectedOptions[0]?.text === '{here} (loaded)'")
        await page.run(f"$('model').value = '{other}'; $('model').dispatchEvent(new Event('change'))")
        await page.until(f"$('absent')?.textContent === '{other} is not loaded; a message to it loads it.'")
        await page.run("$('text').focus()")
        await page.write("x")
        await page.key("Enter", 13)
        await page.until("document.querySelector('.answer')?.textContent && !$('absent')")
        await page.key("Escape", 27)
        await page.until("!$('stop')")
        await page.until(f"$('model').selectedOptions[0].text === '{other} (loaded)'")
        await page.point("#load", click=True)
        await page.until("$('load').textContent === 'Load' && $('absent')")


def test_loading_by_hand_and_a_router_that_is_killed(router: Any, client: openai.OpenAI) -> None:
    plain = client.with_options(base_url=router.url)
    if status(client, "a")["value"] != "loaded":
        say(client, "a")
    assert plain.post("/models/unload", body={"model": "a"}, cast_to=dict[str, Any]) == {"success": True}
    wait(lambda: bool(status(client, "a")["value"] == "unloaded"))
    assert plain.post("/models/load", body={"model": "b"}, cast_to=dict[str, Any]) == {"success": True}
    wait(lambda: bool(status(client, "b")["value"] == "loaded"))
    (pid,) = children(router)
    router.process.kill()  # without a chance to say good-bye
    wait(lambda: not _is_child(pid))
