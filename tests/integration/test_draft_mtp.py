"""Drafts of MTP heads and drafters through the port: the same texts in fewer steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.commands import command
from tests.helpers.drafter_files import write_dflash, write_eagle3, write_gemma4_assistant
from tests.helpers.mtp_specs import NEXTN
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_gemma3n import SMALL as GEMMA4
from tests.models.gguf.test_mtp_file import three_files

Drafted = tuple[Path, tuple[str, ...]]
SMALL: dict[str, Any] = {"n_layer": 3, "n_vocab": 512, "n_ctx_train": 2048}
PROMPT = "Rivers and rain, and rivers. " * 5
BODY: dict[str, Any] = {"prompt": PROMPT, "n_predict": 60, "ignore_eos": True, "return_tokens": True}
OFF = {"speculative.type": "none"}
SIZES = ("-c", "2048", "-np", "3", "-kvu", "--metrics")
MTP = ("--spec-type", "draft-mtp")
FLAGS = (*SIZES, *MTP, "--no-spec-draft-adapt")
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, 22, 333]}}}, "required": ["a"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guesses")


def head_in_model(folder: Path, name: str) -> Drafted:
    s = replace(NEXTN[name], n_vocab=512, n_ctx_train=2048, vocabulary=True, untied=True)
    write(path := folder / f"{name}.gguf", replace(s, traits=(*s.traits, "agrees", "much")))
    return path, MTP


def eagle3(folder: Path, name: str) -> Drafted:
    s = Spec(name, vocabulary=True, untied=True, traits=("agrees", "much"), **SMALL)
    t = write(path := folder / f"{name}-eagle3.gguf", s)
    ids = np.sort(np.random.default_rng(1).permutation(512)[:400])
    write_eagle3(drafter := folder / "eagle3.gguf", s, **{"d2t": ids, "output.weight": t["output.weight"][ids]})
    return path, ("-md", str(drafter))


def dflash(folder: Path, name: str) -> Drafted:
    s = Spec(name, vocabulary=True, untied=True, traits=("agrees", "much"), **SMALL)
    t = write(path := folder / f"{name}-dflash.gguf", s)
    write_dflash(drafter := folder / "dflash.gguf", s, embedding=t["token_embd.weight"])
    return path, ("-md", str(drafter))


def gemma4(folder: Path, name: str) -> Drafted:
    s = replace(GEMMA4, n_vocab=512, n_ctx_train=2048, vocabulary=True)
    t = write(path := folder / f"{name}.gguf", s)
    write_gemma4_assistant(drafter := folder / "assistant.gguf", s, t["token_embd.weight"])
    return path, ("-md", str(drafter))


MAKERS = {
    "mtp": (head_in_model, "qwen35, no norm behind"),
    "eagle3": (eagle3, "llama"),
    "dflash": (dflash, "llama"),
    "gemma4": (gemma4, "gemma4"),
}
with_all = pytest.mark.parametrize("drafted", MAKERS, indirect=True)


@pytest.fixture(scope="module", params=["mtp", "eagle3"])
def drafted(request: pytest.FixtureRequest, folder: Path) -> Drafted:
    """Models, with states and without, and the flags with which something drafts for them."""
    make, name = MAKERS[request.param]
    found: Drafted = make(folder, name)
    return found


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return head_in_model(folder, "glm4moe 355B")[0]


@with_all
def test_texts_are_the_same_and_steps_fewer(serve_here: Any, connect: Any, drafted: Drafted) -> None:
    path, flags = drafted
    server = serve_here(path, *SIZES, *flags, "--no-spec-draft-adapt")
    hot = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    repeats = {"repeat_penalty": 1.3, "dry_multiplier": 0.8, "temperature": 0.7}
    wishes = [{"temperature": 0, "n_probs": 3}, *({**hot, "seed": i} for i in range(3)), {**repeats, "seed": 4}]
    plain = [server.post("/completion", {**BODY, **wish, **OFF}) for wish in wishes]
    before = steps(server)
    guessed = [server.post("/completion", {**BODY, **wish}) for wish in wishes]
    n_steps = steps(server) - before
    with ThreadPoolExecutor(5) as threads:  # more than there are slots
        together = list(threads.map(lambda wish: server.post("/completion", {**BODY, **wish}), wishes))
    for want, *found in zip(plain, guessed, together, strict=True):
        for got in found:
            assert got["tokens"] == want["tokens"]
            assert got.get("completion_probabilities") == want.get("completion_probabilities")
    assert "draft_n" not in plain[0]["timings"]
    assert guessed[0]["timings"]["draft_n_accepted"] > 4
    n_accepted = sum(got["timings"]["draft_n_accepted"] for got in guessed)
    assert n_steps <= sum(len(got["tokens"]) for got in guessed) - n_accepted + len(wishes)
    usage = connect(f"{server.url}/v1").completions.create(model="m", prompt=PROMPT, max_tokens=20, temperature=0).usage
    assert usage.completion_tokens == 20


@with_all
def test_prompt_of_many_steps_has_the_logits_of_a_server_without_drafter(serve_here: Any, drafted: Drafted) -> None:
    path, flags = drafted
    body = {**BODY, "n_predict": 8, "temperature": 0, "n_probs": 3}
    sizes = "-c", "512", "-np", "1", "-ub", "16"
    plain, guessed = (serve_here(path, *sizes, *more).post("/completion", body) for more in ((), flags))
    assert guessed["completion_probabilities"] == plain["completion_probabilities"]
    assert guessed["timings"]["draft_n"] > 0


@with_all
def test_preempted_and_shifted_texts_are_the_same(serve_here: Any, drafted: Drafted) -> None:
    path, flags = drafted
    shifts = () if flags == MTP else ("--context-shift",)  # states cannot shift
    server = serve_here(path, "-c", "256", "-np", "3", "-kvu", "--no-spec-draft-adapt", *flags, *shifts)
    bodies = [{**BODY, "n_predict": 150, "seed": seed, "n": 1 + seed % 2} for seed in range(4)]
    if shifts:
        bodies.append({**BODY, "n_predict": 400, "temperature": 0})
    want = [server.post("/completion", {**body, **OFF}) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as threads:
        found = list(threads.map(lambda body: server.post("/completion", body), bodies))
    for got, expected in zip(found, want, strict=True):
        pairs = [(got, expected)] if isinstance(got, dict) else zip(got, expected, strict=True)
        for one, other in pairs:
            assert one["tokens"] == other["tokens"]
            assert one["timings"]["draft_n"] > 0


def steps(server: Any) -> int:
    lines = server.get("/metrics").splitlines()
    return int(float(next(line for line in lines if line.startswith("llamacpp:n_decode_total")).split()[1]))


def test_a_second_turn_and_a_saved_slot(serve_here: Any, drafted: Drafted, tmp_path: Path) -> None:
    path, flags = drafted
    options = (*SIZES, *flags, "--no-spec-draft-adapt", "--slot-save-path", str(tmp_path))
    server = serve_here(path, *options)
    first = server.post("/completion", {**BODY, "temperature": 0, "id_slot": 0})
    assert server.post("/slots/0?action=save", {"filename": "slot"})["n_saved"] > 60
    prompt = server.post("/tokenize", {"content": PROMPT, "add_special": True})["tokens"]
    longer = {**BODY, "prompt": [*prompt, *first["tokens"], 5, 6], "temperature": 0, "id_slot": 0}
    want = server.post("/completion", {**longer, "cache_prompt": False, "id_slot": 1})
    other = serve_here(path, *options)
    assert other.post("/slots/0?action=restore", {"filename": "slot"})["n_restored"] > 60
    for got in (server.post("/completion", longer), other.post("/completion", longer)):
        assert got["tokens"] == want["tokens"]
        assert got["timings"]["cache_n"] > 60
        # Of one token it is not known what was said of the one before, so a guess may be another.
        assert abs(got["timings"]["draft_n_accepted"] - want["timings"]["draft_n_accepted"]) <= 2


def test_the_block_may_have_a_file_of_its_own(serve_here: Any, tmp_path: Path) -> None:
    s = replace(NEXTN["glm4moe 355B"], n_vocab=512, n_ctx_train=2048, vocabulary=True, untied=True)
    both, layers, block = three_files(tmp_path, replace(s, traits=(*s.traits, "agrees", "much")))
    want = serve_here(both, *FLAGS).post("/completion", {**BODY, "temperature": 0})
    server = serve_here(layers, *SIZES, "--no-spec-draft-adapt", "-md", str(block))  # which says what it is
    got = server.post("/completion", {**BODY, "temperature": 0})
    assert got["tokens"] == want["tokens"]
    counts = [(r["timings"]["draft_n"], r["timings"]["draft_n_accepted"]) for r in (got, want)]
    assert counts[0] == counts[1]
    assert counts[0][1] > 10
    with pytest.raises(Exception, match="400"):
        server.post("/completion", {**BODY, "speculative.type": "draft-simple"})
    said = command("serve", "-m", str(layers), "--port", "0", "-md", str(block), "--spec-type", "draft-simple")
    assert (said.returncode, said.stderr.count(b"\n")) == (1, 1)
    assert said.stderr.endswith(
        b": has a block that predicts one token more, and no layers before it: give --spec-type draft-mtp\n"
    )


def test_a_model_without_such_a_block(path: Path, serve_here: Any, tmp_path: Path) -> None:
    write(plain := tmp_path / "m.gguf", replace(NEXTN["glm4moe"], n_mtp=0, n_vocab=512, vocabulary=True))
    said = command("serve", "-m", str(plain), "--port", "0", "--spec-type", "draft-mtp")
    assert (said.returncode, said.stderr.count(b"\n")) == (1, 1)
    assert said.stderr.startswith(b"logitless: --spec-type draft-mtp: the model has no block that predicts")
    server = serve_here(path, "-c", "512")
    with pytest.raises(Exception, match="400"):
        server.post("/completion", {**BODY, "speculative.type": "draft-mtp"})
