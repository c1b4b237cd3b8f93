"""Python API: results, concurrent requests, errors, and an unchanged host process."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt
import pytest

import logitless
from logitless import (
    LLM,
    AsyncLLM,
    DeviceError,
    Error,
    FileError,
    ModelError,
    OptionError,
    RequestError,
    SamplingParams,
    Trainer,
    TrainingError,
    serve,
)
from logitless.engine.loading.options import ModelOptions
from logitless.llm import _end
from logitless.options import _SOURCES, Options
from logitless.trainer import Control, Event, Finished, Step
from logitless.training.config import TrainingConfig
from logitless.training.reporting import trackers
from tests.helpers.paths import ROOT

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TALK = [{"role": "user", "content": "Good night!"}]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
MODULES = sorted(path.stem for path in (ROOT / "logitless").glob("*.py") if path.stem != "__main__")
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(parallel=4, ctx_size=2048) as one:
        yield one


def run(code: str, *arguments: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


# -- the package


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("logitless" if name == "__init__" else f"logitless.{name}")
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert not failed


def test_import_loads_nothing_and_every_name_can_be_imported() -> None:
    code = "import sys, logitless; print(*sorted(m for m in sys.modules if m.startswith(('numpy', 'logitless'))))"
    assert run(code).split() == ["logitless"]
    for name in logitless.__all__:
        assert getattr(logitless, name) is not None
    assert {*logitless.__all__} <= {*dir(logitless)}
    assert logitless.__version__
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = logitless.nonsense


def test_keywords_for_type_checkers_are_the_options() -> None:
    assert [*Options.__annotations__] == [*_SOURCES, *(f.name for f in fields(ModelOptions))]


def test_graph_is_part_of_it() -> None:
    from logitless import graph

    assert graph is importlib.import_module("logitless.graph")


# -- results


def test_a_batch_gives_the_same_texts_as_one_by_one(llm: LLM) -> None:
    prompts = ["ROMEO:", "JULIET:", "The king", "Good night", "Who is there?", "Nay"]
    together = llm.generate(prompts, GREEDY)
    assert [c.text for c in together] == [llm.generate(prompt, GREEDY).text for prompt in prompts]
    assert all(c.finish_reason == "length" and len(c.token_ids) == 8 for c in together)
    assert all(c.prompt_tokens == len(llm.tokenize(p)) for c, p in zip(together, prompts, strict=True))


def test_params_of_each_prompt_and_seeds(llm: LLM) -> None:
    params = [SamplingParams(seed=1, max_tokens=4), SamplingParams(seed=2, max_tokens=12), None]
    first = llm.generate(["ROMEO:"] * 2, params[:2])
    assert [len(c.token_ids) for c in first] == [4, 12]
    assert [c.seed for c in first] == [1, 2]
    assert llm.generate("ROMEO:", params[1]).text == first[1].text
    with pytest.raises(RequestError, match="params: 3 of them for 1 prompts"):
        llm.generate(["ROMEO:"], params)
    assert llm.generate([], GREEDY) == []


def test_stop_texts_and_token_ids(llm: LLM) -> None:
    text = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=60)).text
    word = text.split()[1]
    stopped = llm.generate([llm.tokenize("ROMEO:")], SamplingParams(temperature=0, max_tokens=60, stop=word))[0]
    assert stopped.text == text[: text.index(word)]
    assert stopped.finish_reason == "stop"


def test_logprobs_bias_and_grammar(llm: LLM) -> None:
    completion = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    assert [p.id for p in completion.logprobs] == [*completion.token_ids]
    assert all(len(p.top) == 2 and p.top[0] == (p.id, p.logprob) for p in completion.logprobs)
    first = completion.token_ids[0]
    biased = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=1, logit_bias={first: -float("inf")}))
    assert biased.token_ids[0] == completion.logprobs[0].top[1][0]
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    made = llm.generate("ROMEO:", SamplingParams(seed=3, max_tokens=60, json_schema=schema)).text
    assert '"age"' in made


def test_fields_of_vllm(llm: LLM) -> None:
    plain = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=20))
    last = plain.token_ids[9]
    n = plain.token_ids.index(last)
    ended = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[last]))
    assert (ended.token_ids, ended.finish_reason) == (plain.token_ids[: n + 1], "stop")
    held = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[last], min_tokens=15)
    assert last not in llm.generate("ROMEO:", held).token_ids[:15]
    for asked in ({"guided_choice": ["Yea", "Nay"]}, {"structured_outputs": {"choice": ["Yea", "Nay"]}}):
        assert llm.generate("ROMEO:", SamplingParams(temperature=0, **asked)).text in ("Yea", "Nay")
    prompt = llm.tokenize("ROMEO:")
    told = llm.generate("ROMEO:", SamplingParams(max_tokens=1, prompt_logprobs=1)).prompt_logprobs
    assert told[0] is None
    assert [t.id for t in told[1:] if t is not None] == prompt[1:]
    cut = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=2))
    assert cut.text == llm.generate([prompt[-2:]], SamplingParams(temperature=0, max_tokens=4))[0].text
    allowed = SamplingParams(max_tokens=9, seed=1, allowed_token_ids=plain.token_ids, ignore_eos=True)
    assert set(llm.generate("ROMEO:", allowed).token_ids) <= set(plain.token_ids)


def test_streams_add_up(llm: LLM) -> None:
    chunks = [*llm.stream("ROMEO:", GREEDY)]
    assert "".join(chunk.text for chunk in chunks) == llm.generate("ROMEO:", GREEDY).text
    assert [chunk.finish_reason for chunk in chunks] == [None] * 8 + ["length"]
    messages = [{"role": "user", "content": "Good night!"}]
    parts = [*llm.stream_chat(messages, GREEDY)]
    assert "".join(part.text for part in parts) == llm.chat(messages, GREEDY).text
    assert parts[-1].finish_reason == "length"


def test_chat_calls_tools(llm: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=120)
    messages = [{"role": "user", "content": "How warm is Verona?"}]
    answer = llm.chat(messages, params, tools=[WEATHER], tool_choice="required")
    (call,) = answer.message.tool_calls[:1]
    assert call.name == "weather"
    assert call.arguments.startswith("{")
    parts = [*llm.stream_chat(messages, params, tools=[WEATHER], tool_choice="required")]
    assert "".join(part.tool_arguments for part in parts if part.tool_index == 0) == call.arguments


def test_embeddings_and_scores(llm: LLM) -> None:
    vectors = llm.embed(["Good night", "Nay, answer me"], pooling="mean")
    assert vectors.shape == (2, 128)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1])
    assert (llm.embed("Good night", pooling="mean") == vectors[0]).all()
    one, other = llm.score(["To be or not to be", {"prompt": "Who is there?", "completion": " Nay"}])
    assert one.n_counted == len(one.token_ids) - 1 == len(one.logprobs)
    assert one.loss == pytest.approx(-float(one.logprobs.mean()))
    assert other.n_counted < len(other.token_ids) - 1
    assert llm.score(["Nay"], gradient_norm=True)[0].gradient_norm > 0  # type: ignore[operator]
    assert llm.score([]) == []


def test_tokens_there_and_back(llm: LLM) -> None:
    assert llm.detokenize(llm.tokenize("Good night!", add_special=False)) == "Good night!"
    with pytest.raises(RequestError, match=r"token_ids: 999999 is outside the vocabulary of \d+"):
        llm.detokenize([999999])


def test_finetune_beside_requests(llm: LLM) -> None:
    rows = [{"prompt": "Who is there?", "completion": " Nay, answer me."}] * 8
    job = llm.finetune(rows, n_epochs=2, batch_size=4, context_length=32, learning_rate_multiplier=10)
    text = llm.generate("ROMEO:", GREEDY).text
    steps = [event["data"]["step"] for event in job.events() if event["type"] == "metrics"]
    name = job.wait()
    assert (job.status, job.model, steps) == ("succeeded", name, [1, 2, 3, 4])
    assert llm.generate("ROMEO:", GREEDY).text == text
    prompt = "Who is there?"
    before, after = (llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4, model=m)) for m in (None, name))
    assert before.text != after.text
    with pytest.raises(TrainingError, match=r"training\.jsonl: line 1"):
        llm.finetune([{"nonsense": 1}])
    with pytest.raises(RequestError, match=r"hyperparameters\.epochs"):
        llm.finetune(rows, epochs=1)


def test_a_finetune_can_be_cancelled(llm: LLM) -> None:
    job = llm.finetune(["A long text. " * 40] * 50, n_epochs=50)
    job.cancel()
    with pytest.raises(TrainingError, match="the job was cancelled"):
        job.wait()


# -- many at once


def test_threads_and_models_do_not_disturb_each_other(llm: LLM, shared_data: Path) -> None:
    want = {prompt: llm.generate(prompt, GREEDY).text for prompt in ("ROMEO:", "JULIET:", "The king")}
    found: list[tuple[str, str]] = []
    with LLM(shared_data / "models" / "stories260K.gguf") as other:

        def ask(prompt: str) -> None:
            other.generate(prompt, GREEDY)
            found.append((prompt, llm.generate(prompt, GREEDY).text))

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in want for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == sorted([*want.items()] * 3)


def test_leaving_a_stream_frees_its_slot(llm: LLM) -> None:
    for chunk in llm.stream("ROMEO:", LONG):
        assert chunk.finish_reason is None
        break
    assert llm.stats()["requests_processing"] == 0
    assert llm.generate("ROMEO:", GREEDY).finish_reason == "length"


async def test_inside_a_running_event_loop(llm: LLM) -> None:
    """As in a notebook."""
    assert llm.generate("ROMEO:", GREEDY).finish_reason == "length"


async def test_many_async_requests() -> None:
    async with AsyncLLM(parallel=3) as llm:

        async def text(prompt: str) -> str:
            return "".join([chunk.text async for chunk in llm.generate(prompt, GREEDY)])

        prompts = ["ROMEO:", "JULIET:", "The king", "Nay"]
        together = await asyncio.gather(*map(text, prompts))
        assert together == [await text(prompt) for prompt in prompts]
        assert [c.text for c in await llm.complete(prompts, GREEDY)] == together
        answer = await llm.answer([{"role": "user", "content": "Good night!"}], GREEDY)
        parts = [part async for part in llm.chat([{"role": "user", "content": "Good night!"}], GREEDY)]
        assert "".join(part.text for part in parts) == answer.text
        assert (await llm.stats())["tokens_predicted"] >= 8 * 4

        async def first(stream: AsyncIterator[Any]) -> None:
            async for _ in stream:
                return

        async with aclosing(llm.generate("ROMEO:", LONG)) as stream:
            await first(stream)
        assert (await llm.stats())["requests_processing"] == 0
        task = asyncio.create_task(llm.complete(["ROMEO:"] * 8, LONG))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await llm.stats())["requests_processing"] == 0
    with pytest.raises(Error, match="this model is closed"):
        await llm.start()
    await llm.close()


# -- HTTP


def test_http_beside_python(llm: LLM) -> None:
    with serve(llm, port=0, alias="romeo", metrics=True) as server:
        body = {"prompt": "ROMEO:", "temperature": 0, "max_tokens": 8}
        request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request) as reply:
            answer = json.load(reply)
        assert answer["model"] == "romeo"
        assert answer["choices"][0]["text"] == llm.generate("ROMEO:", GREEDY).text
        with pytest.raises(OptionError, match=rf"port: cannot listen on 127\.0\.0\.1:{server.port}"):
            serve(llm, port=server.port)
    assert llm.generate("ROMEO:", GREEDY).finish_reason == "length"
    with pytest.raises(OptionError, match="unexpected keyword argument 'colour'"):
        serve(llm, colour="red")


# -- training


class Recorder:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ends: list[bool] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)

    def finish(self, *, succeeded: bool) -> None:
        self.ends.append(succeeded)


def test_trainer_shapes_its_adapter_and_reports_to_trackers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", None)  # is not installed
    logged = Recorder()
    monkeypatch.setitem(trackers._OPEN, "tensorboard", lambda of, run: logged)
    rows = [{"prompt": "Who is there?", "completion": " Nay, answer me."}] * 8
    adapter: dict[str, Any] = {"lora_r": 2, "lora_alpha": 4.0, "lora_target_modules": ["q_proj"], "lora_rslora": True}
    with Trainer(
        None, rows, ctx_size=32, batch_size=4, iterations=2, **adapter, lora_plus_ratio=4.0, neftune_noise_alpha=5.0,
        report_to=["tensorboard", "mlflow"], report_dir=tmp_path,
    ) as trainer:  # fmt: skip
        trainer.fit()
        trainer.save_peft(tmp_path / "peft")
        trainer.save(tmp_path / "a.gguf")
    assert (logged.steps, logged.ends) == ([1, 2], [True])
    assert "mlflow: is not there, and the run goes on without it" in caplog.text
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["r"] == 2
    assert all(name.endswith("self_attn.q_proj") for name in config["target_modules"])
    with (
        Trainer(None, rows, ctx_size=32, iterations=1, full=True) as trainer,
        pytest.raises(TrainingError, match="peft"),
    ):
        trainer.save_peft(tmp_path / "full")


def test_trainer_reports_changes_gradients_and_saves(tmp_path: Path) -> None:
    rows = [{"prompt": "Who is there?", "completion": " Nay, answer me."}] * 16
    events: list[Event] = []
    rates: list[float] = []
    seen: list[int] = []

    def gradients(arrays: dict[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
        seen.append(len(arrays))
        return {name: 0 * array for name, array in arrays.items()}

    def fit(**hooks: Any) -> list[float]:
        events.clear()
        settings = {"ctx_size": 32, "batch_size": 4, "iterations": 3, "learning_rate": 1e-2, "weight_decay": 0.0}
        with Trainer(None, rows, callbacks=[events.append], **settings, **hooks) as trainer:
            assert trainer.fit().reason == "3 iterations are done"
            trainer.save(tmp_path / "adapter.gguf")
        assert isinstance(events[-1], Finished)
        return [event.loss for event in events if isinstance(event, Step)]

    learned = fit(before_step=lambda control: rates.append(control.rate))
    assert learned[2] < learned[0]
    assert rates == [1e-2] * 3
    with LLM(lora=tmp_path / "adapter.gguf") as tuned, LLM() as plain:
        assert tuned.generate("Who is there?", GREEDY).text != plain.generate("Who is there?", GREEDY).text
    still = fit(on_gradients=gradients)
    assert still == pytest.approx([still[0]] * 3)
    assert len(seen) == 3

    def cancel(control: Control) -> None:
        control.cancel = True

    with Trainer(None, rows, ctx_size=32, before_step=cancel) as trainer:
        assert trainer.fit().cancelled


# -- errors


def test_a_model_of_vectors_does_not_write(shared_data: Path) -> None:
    model = shared_data / "models" / "stories260K.gguf"
    with LLM(model, override_kv="llama.attention.causal=bool:false", ctx_size=256) as llm:
        assert llm.embed(["Once"]).shape == (1, 64)
        for ask in (
            lambda: llm.generate("Once"),
            lambda: llm.generate(["Once"]),
            lambda: list(llm.stream("Once")),
            lambda: llm.chat([{"role": "user", "content": "Hi"}]),
            lambda: llm.score([{"text": "Once upon"}]),
        ):
            with pytest.raises(RequestError, match=r"^this model makes vectors of texts"):
                ask()


@pytest.mark.parametrize(
    ("options", "kind", "line"),
    [
        ({"ctx_size": -3}, OptionError, "ctx_size: -3 is not a whole number from 0 to 1073741824"),
        ({"ctx": 3}, OptionError, "ctx: there is no such option"),
        ({"kv_unified": "yes"}, OptionError, "kv_unified: 'yes' is not True or False"),
        ({"device": "vulkan:99"}, (OptionError, DeviceError), "vulkan:99"),
        ({"model_draft": "my--draft.gguf"}, (OptionError, ModelError), "my--draft.gguf"),
        ({"ctx_size": 3, "kv_unified": False}, OptionError, "ctx_size 3 leaves nothing for each of 4 slots"),
        ({"model": "nowhere.gguf"}, ModelError, "nowhere.gguf: no such file"),
        ({"lora": "nowhere.gguf"}, ModelError, "nowhere.gguf: no such file"),
        ({"hf_repo": "nonsense"}, OptionError, "hf_repo: 'nonsense' is not USER/REPO or USER/REPO:QUANT"),
        ({"hf_file": "x.gguf"}, OptionError, "hf_file needs hf_repo"),
        ({"chat_template_file": "/nope"}, FileError, "/nope: no such file or directory"),
        ({"data_dir": __file__}, FileError, "file exists"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], kind: type[Error], line: str) -> None:
    with pytest.raises(kind) as caught:
        LLM(**options)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_closes_at_once_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        in_this_process = True

        async def close(self) -> None:
            pass

    def until_done(coroutine: Any, loop: asyncio.AbstractEventLoop) -> Any:
        future = submit(coroutine, loop)
        future.result()
        return future

    submit, loop = asyncio.run_coroutine_threadsafe, asyncio.new_event_loop()
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", until_done)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    _end(Closed(), loop, thread)  # type: ignore[arg-type]
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"ctx_size": 100000}, "ctx_size 100000: is more than the model's 256"),
        ({"batch_size": 0}, "batch_size: 0 is not between 1 and 65536"),
        ({"val_split": 2}, "val_split: 2 is not between 0 and 0.99"),
        ({"learning_rate": -1}, "learning_rate: -1 is not at least 1e-30"),
        ({"weight_decay": 5}, "weight_decay: 5 is not between 0 and 1"),
        ({"seed": -1}, "seed: -1 is not at least 0"),
        ({"warmup": -1}, "warmup: -1 is not at least 0"),
        ({"lora_target_modules": ["x"]}, "lora_target_modules: the model has no matrix 'x' to adapt"),
        ({"lora_rslora": True}, "lora_rslora: needs a lora_alpha"),
        ({"lora_plus_ratio": 0}, "lora_plus_ratio: 0 is not between 0.001 and 1000"),
        ({"lora_rank": 2}, "lora_rank: is no field of TrainingConfig; lora_ranks is"),
        ({"config": TrainingConfig(full=True), "lora_dora": True}, "lora_dora: is of an adapter, and all weights are"),
        ({"gamma": 1.0, "method": "dpo"}, "gamma: is of simpo, and the method is dpo"),
        ({"batch_size": "many"}, "batch_size: 'many': expected `int`, got `str`"),
        ({"report_to": ["comet"]}, "report_to: 'comet' is not one of wandb, mlflow, tensorboard"),
        ({"learning_rate": 1e300}, "learning_rate: 1e+300 is not between 1e-30 and 3.40282e+38"),
        ({"seed": 2**70}, "seed: 1180591620717411303424 is not between 0 and"),
        ({"callbacks": [5]}, "callbacks: expected a list of functions, got [5]"),
        ({"mmproj": "/nope.gguf", "callbacks": None}, "/nope.gguf: no such file"),
        ({"data": None}, "data: expected a file or rows, got NoneType"),
        ({"data": "/nope.jsonl"}, "/nope.jsonl: no such file or directory"),
        ({"data": [{"text": "a\ud800b" * 50}], "ctx_size": 16}, "a text has a lone surrogate, '\\ud800'"),
        ({"data": [{"text": "a"}, None]}, "data: row 1: expected an object, got NoneType"),
    ],
)
def test_wrong_settings_of_a_training_name_the_option(options: dict[str, Any], line: str) -> None:
    with pytest.raises(Error) as caught:
        Trainer(None, **{"data": [{"text": "hello there"}], **options})
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"temperature": "hot"}, "field 'temperature': expected a number"),
        ({"temperature": b"hot"}, "field 'temperature': expected a number, got bytes"),
        ({"adapters": {"x": 1}}, "adapters: there is no adapter 'x'"),
        ({"model": "ft:x"}, "field 'model': the model 'ft:x' does not exist"),
        ({"grammar": "root ::= ("}, "field 'grammar'"),
        ({"max_tokens": -5}, "field 'max_tokens'"),
        ({"stop": [1]}, "field 'stop': item 0: expected a string"),
        ({"adaptive_decay": 2}, "field 'adaptive_decay': must be between 0 and 0.99"),
    ],
)
def test_wrong_requests_name_the_field(llm: LLM, params: dict[str, Any], line: str) -> None:
    for call in (llm.generate, lambda prompt, p: [*llm.stream(prompt, p)]):
        with pytest.raises(RequestError) as caught:
            call("ROMEO:", SamplingParams(**params))
        assert line in str(caught.value)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda m: m.chat(TALK, temprature=0), "field 'temprature': there is none (did you mean temperature?)"),
        (lambda m: m.chat(TALK, stream=True), "field 'stream': there is none"),
        (lambda m: m.chat("hello"), "field 'messages': expected a list of messages, not str"),
        (lambda m: m.chat(["hello"]), "field 'messages': item 0: expected an object, not str"),
        (lambda m: m.chat(TALK, {"temperature": 0}), "params: expected SamplingParams, not dict"),
        (lambda m: m.chat(TALK, GREEDY, sampling_params=GREEDY), "params and sampling_params are the same"),
        (lambda m: m.generate(5), "prompts: expected a text or a list of prompts, not int"),
        (lambda m: m.generate([5]), "prompts[0]: expected a text or token ids, not int"),
        (lambda m: m.generate([[1.5]]), "prompts[0]: token 0: expected a whole number, not 1.5"),
        (lambda m: m.generate({"text": "a"}), "expected 'prompt' or 'prompt_token_ids', not 'text'"),
        (lambda m: m.generate("a", {"max_tokens": 1}), "params: expected SamplingParams, not dict"),
        (lambda m: m.generate("a", SamplingParams(logprobs=-1)), "field 'logprobs': must be 0 or more, not -1"),
        (lambda m: m.score(5), "texts: expected a list, not int"),
        (lambda m: m.embed([None]), "texts[0]: expected a text or token ids, not NoneType"),
        (lambda m: m.rerank("a", "b"), "documents: expected a list, not str"),
        (lambda m: m.tokenize(5), "text: expected a text, not int"),
        (lambda m: m.detokenize(["a"]), "token_ids: token 0: expected a whole number, not 'a'"),
        (lambda m: m.detokenize(5), "token_ids: expected a list, not int"),
    ],
)
def test_wrong_types_are_request_errors(llm: LLM, call: Callable[[LLM], object], line: str) -> None:
    with pytest.raises(RequestError) as refusal:
        call(llm)
    assert line in str(refusal.value)


def test_habits_of_vllm(llm: LLM) -> None:
    one = llm.generate("ROMEO:", GREEDY)
    assert one.outputs[0].text == one.text
    assert llm.generate("ROMEO:", sampling_params=GREEDY).text == one.text
    assert llm.generate({"prompt": "ROMEO:"}, GREEDY).text == one.text
    ids = np.array(llm.tokenize("ROMEO:"))
    assert [c.text for c in llm.generate([{"prompt_token_ids": ids}, ids], GREEDY)] == [one.text] * 2
    chat = llm.chat(TALK, sampling_params=GREEDY)
    assert chat.text == llm.chat(TALK, GREEDY).text == llm.chat(TALK, temperature=0, max_tokens=8).text
    assert llm.score("ROMEO: hello").loss == llm.score(["ROMEO: hello"])[0].loss
    numbers = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(8))
    assert llm.generate("ROMEO:", numbers).text == one.text
    assert len({numbers, SamplingParams(temperature=0, max_tokens=8), SamplingParams(logit_bias={1: 2.0})}) == 2
    strong = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.5))
    same = SamplingParams(temperature=0, max_tokens=8, repeat_penalty=1.5, repeat_last_n=-1)
    assert strong.text == llm.generate("ROMEO:", same).text


def test_feature_missing_in_model_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="has no head that ranks"):
        llm.rerank("a", ["b"])
    with pytest.raises(RequestError, match="pooling: 'rank' gives no embeddings"):
        llm.embed("a", pooling="rank")
    with pytest.raises(RequestError, match="exceed"):
        llm.generate("word " * 2000, GREEDY)
    with pytest.raises(OptionError, match="method: 'magic' is not one of lora, full"):
        Trainer(None, [], method="magic")
    with pytest.raises(TrainingError):
        Trainer(None, [{"nonsense": 1}])


# -- the host process

STATE = """
import asyncio, gc, logging, os, signal, sys, threading, warnings
from logitless import LLM, SamplingParams, serve
asyncio.new_event_loop().close()  # makes the default policy
def state():
    return {
        "switch": sys.getswitchinterval(), "recursion": sys.getrecursionlimit(), "path": list(sys.path),
        "signals": [signal.getsignal(s) for s in signal.valid_signals()],
        "root": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "ours": (logging.getLogger("logitless").level, list(logging.getLogger("logitless").handlers)),
        "cwd": os.getcwd(), "environment": dict(os.environ), "warnings": list(warnings.filters),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()), "affinity": os.sched_getaffinity(0),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook), "trace": sys.gettrace(),
        "out": (sys.stdin, sys.stdout, sys.stderr), "umask": (m := os.umask(0), os.umask(m))[0],
        "policy": getattr(asyncio.events, "_event_loop_policy", None),
    }
before = state()
threads = threading.active_count()
with LLM() as llm, serve(llm, port=0):
    llm.generate(["ROMEO:"] * 3, SamplingParams(max_tokens=4))
    during = state()
after = state()
print(*[k for k in before if not before[k] == during[k] == after[k]])
print(threading.active_count() - threads)
"""


def test_the_host_process_stays_as_it_was() -> None:
    changed, threads = run(STATE).split("\n")[:2]
    assert changed == ""
    assert threads == "0"


def test_a_program_ends_without_closing_its_models() -> None:
    code = "from logitless import LLM, SamplingParams as P; llm = LLM(); print(len(llm.generate('a', P(max_tokens=3))."
    assert run(code + "token_ids))") == "3\n"


def test_a_fork_is_told_that_the_model_is_its_parents() -> None:
    code = """
import os
from logitless import LLM, Error, SamplingParams
llm = LLM()
child = os.fork()
if child == 0:
    try:
        llm.generate("a")
    except Error as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(llm.generate("ROMEO:", SamplingParams(max_tokens=3)).finish_reason)
"""
    told = "this model belongs to the process that forked this one: open it again here\nlength\n"
    assert run("import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n" + code) == told
    assert get_type_hints(LLM.close)["return"] is type(None)
