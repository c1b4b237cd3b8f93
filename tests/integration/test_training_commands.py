"""`finetune`, `train` and `export-lora` as a user types them."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from logitless.backends.cpu.backend import CPUBackend
from logitless.cli.flags.flags import UsageError, parse
from logitless.cli.flags.options import DEVICE, THREADS
from logitless.cli.flags.options_training import FINETUNE, TRAIN
from logitless.cli.main import main
from logitless.cli.setup import training_run
from logitless.cli.setup.model import open_session
from logitless.graph.backend import Backend
from logitless.graph.ops.training.optimizer import adamw_params
from logitless.models import tokenizer
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from logitless.models.synthetic.model import ModelShape
from logitless.training.checkpoint import read_checkpoint
from logitless.training.config import TrainingConfig
from logitless.training.data.load import Reader
from logitless.training.run import lora_of, plan_run
from logitless.training.run import settings_of as run_settings
from logitless.training.schedule import rate_at
from logitless.training.scratch import new_model

TEXT = "the quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and a text."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "a.txt").write_text(TEXT)
    new_model(str(folder / "m.gguf"), None, ModelShape(32, 2, 4, 2, 48, 0, n_ctx=64), seed=3)
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(words)
    return code, capsys.readouterr().err


RATE = "logitless.training.trainer.rate_at"


def settings_of(words: list[str]) -> TrainingConfig:
    """Settings of a finetune with these flags."""
    o = parse([f for group in FINETUNE for f in group.flags], ["-c", "8", *words], {})
    return run_settings(training_run.config_of(o, full=False))


@pytest.mark.parametrize(
    ("file", "flags", "n_ctx"),
    [
        ("a.txt", [], 64),  # the model's
        ("short.jsonl", [], 64),
        ("short.jsonl", ["-c", "16"], 16),
        ("middle.jsonl", ["-m", "wide.gguf"], 304),
        ("short.jsonl", ["-m", "wide.gguf"], 128),
        ("long.jsonl", ["-m", "wide.gguf"], 512),
        ("a.txt", ["-m", "wide.gguf"], 128),
        (None, ["-m", "wide.gguf"], 128),
    ],
)
def test_the_window_follows_the_data_and_the_model(
    given: Path, tmp_path: Path, file: str | None, flags: list[str], n_ctx: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are tokens here. A row has a beginning and an end token, and the last one predicts nothing."""
    new_model(str(tmp_path / "wide.gguf"), None, ModelShape(32, 2, 4, 2, 48, 0, n_ctx=512), seed=3)
    for name, n in (("short", 9), ("middle", 300), ("long", 900)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "x" * n}) + "\n" + json.dumps({"text": "y"}) + "\n")
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    o = parse([flag for group in FINETUNE for flag in group.flags], ["-m", str(given / "m.gguf"), *flags], {})
    o.file = file
    with GGUFFile.open(o.model) as gguf:
        words = tokenizer.from_metadata(gguf.metadata)
        plan = plan_run(training_run.config_of(o, full=False), file, Reader(words, None), hparams_of(gguf).n_ctx_train)
    assert plan.settings.n_ctx == n_ctx


def test_a_window_beyond_the_model_is_refused(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, model = str(given / "a.txt"), str(given / "m.gguf")
    for command in (["finetune", "--lora-out", str(tmp_path / "a.gguf")], ["plan", "finetune"]):
        code, told = run(capsys, *command, "-m", model, "--file", data, "-c", "65")
        assert (code, told) == (1, "logitless: --ctx-size 65: is more than the model's 64\n")


def test_defaults_are_the_old_trainers() -> None:
    """Defaults are those of llama.cpp's trainer, but for threads (all cores) and the warm-up (a share of the steps)."""
    o = parse([flag for group in FINETUNE for flag in group.flags], [], {})
    o.ctx_size = parse([flag for group in TRAIN for flag in group.flags], [], {}).ctx_size
    config = training_run.config_of(o, full=False)
    wanted = run_settings(config)
    assert (wanted.n_ctx, wanted.batch_size, wanted.iterations, wanted.epochs) == (128, 8, 256, 0)
    s = wanted
    assert (s.learning_rate, s.warmup, s.cos_decay_steps, s.cos_decay_min) == (1e-3, 0, 1000, 0.1)
    assert (s.cos_decay_restart, s.adam_beta1, s.adam_beta2, s.adam_eps) == (1.1, 0.9, 0.999, 1e-8)
    assert (s.weight_decay, s.adam_decay_min_ndim, s.max_grad_norm) == (0.1, 2, 1.0)
    assert (lora_of(config).rank, o.save_every, o.val_split) == (4, 10, 0.05)
    library = adamw_params(1, 1e-3, betas=(0.9, 0.999), eps=1e-8, decay=0.0)
    assert adamw_params(1, 1e-3).tolist() == library.tolist()


@pytest.mark.parametrize(
    ("flags", "steps", "epochs"),
    [("--epochs 2", 0, 2), ("--epochs 2 --adam-iter 256", 256, 2), ("--epochs -1", 256, 0), ("--iterations 7", 7, 0)],
)
def test_steps_that_are_asked_for_count_beside_epochs(flags: str, steps: int, epochs: int) -> None:
    wanted = settings_of(flags.split())
    assert (wanted.iterations, wanted.epochs) == (steps, epochs)


@pytest.mark.parametrize(
    ("flags", "rates"),
    [("-lr-half 2", [8, 5.6568, 4, 2.8284, 2]), ("-lr-half 1 -lr-halvings 2", [8, 4, 2, 2, 2]), ("", [8] * 5)],
)
def test_a_rate_that_halves(flags: str, rates: list[float]) -> None:
    words = ["-lr", "8", *flags.split()]
    settings = replace(settings_of(words), epochs=5)
    assert [rate_at(settings, 0, epoch) for epoch in range(5)] == pytest.approx(rates, rel=1e-4)


@pytest.mark.parametrize("flags", ["-lr-half 1", "-lr 1 -lr-halvings 2", "-lr 1 -lr-half 1 -lr-min 0.1"])
def test_halvings_of_nothing_are_refused(flags: str) -> None:
    with pytest.raises(UsageError, match="-lr-half"):
        settings_of(flags.split())


@pytest.mark.parametrize(("flags", "decay"), [("", 0.0), ("-wd 0.3", 0.3)])
def test_sgd_decays_as_it_is_told_to(flags: str, decay: float) -> None:
    words = ["--optimizer", "sgd", *flags.split()]
    wanted = settings_of(words)
    assert (wanted.optimizer, wanted.weight_decay) == ("sgd", decay)


def test_from_scratch_then_an_adapter_then_merged(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.txt").write_text(TEXT)
    model, data = str(folder / "m.gguf"), str(folder / "a.txt")
    one = ("--file", data, "-c", "16", "-b", "4", "-t", "1", "--warmup", "0")
    sizes = ("--embd", "32", "--layer", "2", "--head", "4", "--ff", "48")
    plot = str(folder / "loss.svg")
    began = time.monotonic()
    with monkeypatch.context() as fast:  # a minute a second
        fast.setattr(training_run, "time", SimpleNamespace(monotonic=lambda: 60 * time.monotonic()))
        code, told = run(capsys, "train", *sizes, *one, "-o", model, "--iterations", "4", "--plot", plot)
    spent = time.monotonic() - began
    assert code == 0, told
    assert "4 steps on cpu\n" in told
    assert "train: iter=4/4 sample=16/" in told
    assert "val: |████████|" in told
    minutes, seconds = map(int, re.findall(r"total training time (\d+):(\d\d)$", told, re.M)[0])
    assert 3 * spent < 60 * minutes + seconds <= 60 * spent + 1
    assert "<polyline" in (folder / "loss.svg").read_text()
    names = ("--lora-out", str(folder / "ad-ITERATION.gguf"), "--checkpoint-out", str(folder / "ck-ITERATION.gguf"))
    code, told = run(capsys, "finetune", "-m", model, *one, *names, "--iterations", "20", "--save-every", "10")
    assert code == 0, told
    found = {path.name for path in folder.glob("*-*.gguf")}
    assert found == {f"{kind}-{at}.gguf" for kind in ("ad", "ck") for at in ("10", "20", "LATEST")}
    assert (folder / "ad-20.gguf").read_bytes()[-500:] == (folder / "ad-LATEST.gguf").read_bytes()[-500:]
    again = ("--checkpoint-in", str(folder / "ck-10.gguf"), "--lora-out", str(folder / "again" / "ad-20.gguf"))
    (folder / "again").mkdir()
    code, told = run(capsys, "finetune", "-m", model, *one, *again, "--iterations", "20", "--save-every", "0")
    assert code == 0, told
    assert "going on after iteration 10" in told
    assert (folder / "again" / "ad-20.gguf").read_bytes() == (folder / "ad-20.gguf").read_bytes()
    only = ("--checkpoint-in", str(folder / "ck-20.gguf"), "--lora-out", str(folder / "again" / "ad-LATEST.gguf"))
    for flags in (("--only-write-lora",), ("-n", "0")):
        assert run(capsys, "finetune", "-m", model, *only, *flags)[0] == 0
        written = folder / "again" / "ad-LATEST.gguf"
        assert written.read_bytes() == (folder / "ad-LATEST.gguf").read_bytes()
        written.unlink()
    code, told = run(capsys, "finetune", "-m", model, *only[:3], only[1], "-n", "0")
    assert code == 1
    assert "ck-20.gguf is the file of --checkpoint-in, and would take its place" in told
    merged = str(folder / "merged.gguf")
    code, told = run(capsys, "export-lora", "-m", model, "--lora-scaled", f"{folder / 'ad-20.gguf'}:0.5", "-o", merged)
    assert code == 0, told
    assert "14 tensors changed" in told
    again_merged = str(folder / "again" / "merged.gguf")
    code, told = run(capsys, "export-lora", "-m", model, "-s", str(folder / "ad-20.gguf"), "0.5", "-o", again_merged)
    assert code == 0, told
    assert Path(again_merged).read_bytes() == Path(merged).read_bytes()
    with GGUFFile.open(merged) as gguf:
        assert gguf.metadata["general.architecture"] == "llama"
        assert len(gguf.tensors) == 20


@pytest.mark.parametrize(
    ("flags", "warmup"),
    [("--iterations 3", 0), ("--iterations 20", 2), ("--epochs 20", 19), ("--iterations 3 --warmup 2", 2),
     ("--iterations 20 --warmup 0", 0), ("--iterations 20 -lr 1e-3", 0)],
)  # fmt: skip
def test_warm_up_is_a_share_of_the_steps(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, warmup: int
) -> None:
    """20 epochs of 38 windows, 4 a step."""
    one = f"finetune -m {given}/m.gguf --file {given}/a.txt -c 8 -b 4 -t 1 --stride 24 -val-split 0 {flags}".split()
    code, told = run(capsys, *one, "--lora-out", str(tmp_path / "a.gguf"), "--checkpoint-out", str(tmp_path / "c.gguf"))
    assert code == 0, told
    with GGUFFile.open(tmp_path / "c.gguf") as gguf:
        assert json.loads(gguf.metadata["training.settings"])["warmup"] == warmup
    assert "never reach" not in told


TEXT_RUN, ROWS_RUN = ("finetune -m M --lora-out A --file T", "finetune -m M --lora-out A --file R.jsonl")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("finetune -m M -o O --file T --lora-r 2", "finetune: --lora-r is of an adapter, and all weights are trained"),
        ("finetune -m M -o O --file T --rank-wq 2", "--rank-wq is of an adapter"),
        ("finetune -m M -o O --file T --lora-dora", "--lora-dora is of an adapter"),
        ("finetune -m M -o O --file T --lora-plus-ratio 4", "--lora-plus-ratio is of an adapter"),
        (f"{TEXT_RUN} --method dpo --neftune-noise-alpha 5", "--neftune-noise-alpha is of supervised learning"),
        ("train -o O --file T --lora-alpha 2", "--lora-alpha"),
        ("export-lora -m M --lora A", "-o FILE or --peft-out DIR"),
        ("export-lora -m M --lora-scaled A:0.5 --peft-out D", "--peft-out takes one adapter, with the scale 1"),
        (f"{TEXT_RUN} --train-tensors blk.*", "--train-tensors is of a whole model, and an adapter is trained"),
        (f"{TEXT_RUN} --output-type f16", "--output-type is of a whole model, and an adapter is written in f32"),
        (f"{ROWS_RUN} --stride 4", "--stride is of a text, and --file R.jsonl is not one"),
        (f"{ROWS_RUN} --sample-start x", "--sample-start is of a text, and --file R.jsonl is not one"),
        (f"{TEXT_RUN} --no-pack", "--no-pack is of a .jsonl file, and --file T is not one"),
        (f"{TEXT_RUN} --overlapping-samples", "--overlapping-samples is of --sample-start, which is not given"),
        (f"{TEXT_RUN} --sample-start x --stride 4", "--stride is of a text without --sample-start"),
        (f"{TEXT_RUN} --sample-start= --include-sample-start", "--include-sample-start has no meaning where"),
        (f"{TEXT_RUN} --sample-start x --separate-with-eos", "--separate-with-eos is of --fill-with-next-samples"),
        (f"{TEXT_RUN} -val-split 0 --validate-every 2", "--validate-every is of -val-split, which is 0"),
        (f"{TEXT_RUN} --force-reshuffle", "--force-reshuffle is of --checkpoint-in, which is not given"),
        (f"{TEXT_RUN} -lr 1e-3 --warmup 3", "--warmup is of the schedule with warm-up and cosine, which -lr replaces"),
        (f"{TEXT_RUN} -lr 1e-3 --adam-alpha 1e-3", "--adam-alpha is of the schedule"),
        (f"{TEXT_RUN} -lr-min 1e-4", "-lr-min halves the rate of -lr, which is not given"),
        (f"{TEXT_RUN} -lr 1e-4 -lr-min 1e-3", "-lr-min of 0.001 is not below the rate of -lr"),
        (f"{TEXT_RUN} -lr 1e-4 -decay-epochs 2", "-decay-epochs is of -lr-min, which is not given"),
        (f"{TEXT_RUN} --cos-decay-restart 2", "--cos-decay-restart is of --enable-restart"),
        (f"{TEXT_RUN} --optimizer sgd --adam-beta1 0.5", "--adam-beta1 is of adamw, and the optimizer is sgd"),
        (f"{TEXT_RUN} --optimizer sgd --adam-decay 0.3", "--adam-decay is of adamw, and the optimizer is sgd"),
        (f"{TEXT_RUN} --adam-decay 0.1 -wd 0.2", "--adam-decay and -wd are two names of the weight decay"),
        (f"{TEXT_RUN} --opt-delta 0.1", "--opt-delta is of --opt-past, which is not given"),
        (f"{TEXT_RUN} --report-project N", "--report-project is of --report-to, which is not given"),
        (f"{TEXT_RUN} --report-to comet", "--report-to"),
        (f"{TEXT_RUN} --pattern-fn-it N", "--pattern-fn-it stands in no file's name"),
        ("plan finetune -m M --full --lora-r 2", "plan finetune: --lora-r is of an adapter"),
        ("plan train --file R.jsonl --stride 2", "plan train: --stride is of a text"),
        ("finetune -m M --lora-out A --checkpoint-in C -n 0 --file T", "--file is of training, and --only-write-lora"),
        ("finetune -m M --lora-out A --only-write-lora --adam-alpha 1", "--adam-alpha is of training"),
    ],
)
def test_a_flag_that_counts_for_nothing_beside_others_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    code, err = run(capsys, *words.split())
    assert code == 2
    assert told in err
    assert len(err.splitlines()) <= 2


def test_ranks_that_cannot_be_had_are_refused(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's output is its embedding, and an adapter's ranks are those of its checkpoint."""
    one = f"finetune -m {given}/m.gguf --file {given}/a.txt -c 8 -b 2 -t 1 --iterations 1".split()
    one += ["--lora-out", str(tmp_path / "a.gguf")]
    code, told = run(capsys, *one, "--rank-out", "4")
    assert code == 2
    assert "--rank-out 4: the model has no tensor 'output.weight'; its output is its embedding" in told
    ranks = ["--lora-r", "2", "--rank-wq", "3", "--lora-alpha", "0.1"]
    assert run(capsys, *one, *ranks, "--checkpoint-out", str(tmp_path / "c.gguf"))[0] == 0
    code, told = run(capsys, *one, "--warmup", "1")
    assert code == 0
    assert "warning: --warmup 1: the 1 steps of the run never reach the learning rate" in told
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "ab"}\n{"text": "ba"}\n')
    few = f"finetune -m {given}/m.gguf --file {rows} -c 8 -b 8 -t 1 --epochs 2 --val-split 0 --lora-out".split()
    code, told = run(capsys, *few, str(tmp_path / "few.gguf"))
    assert code == 0
    assert "warning: --batch-size: a step takes 8 samples, more than there are: 2 epochs are 1 steps" in told
    for flags, problem in (
        ("--lora-target-modules q_proj,x", "--lora-target-modules: the model has no matrix 'x' to adapt"),
        ("--lora-rslora", "--lora-rslora: needs a lora_alpha"),
        ("--lora-dora --lora-init pissa", "--lora-dora: begins at the model itself"),
    ):
        code, told = run(capsys, *one, *flags.split())
        assert code != 0
        assert problem in told
    resumed = [*one, "--checkpoint-in", str(tmp_path / "c.gguf")]
    assert run(capsys, *resumed, *ranks)[0] == 0  # the same again
    code, told = run(capsys, *resumed, "--lora-init", "pissa")
    assert code == 2
    assert '--lora-init: the adapter of --checkpoint-in has "gaussian" there' in told
    for flags in ("--lora-r 8", "--lora-alpha 2", "--rank-wq 4", "--rank-wk 3"):
        code, told = run(capsys, *resumed, *flags.split())
        assert code == 2
        assert f"{flags}: the adapter of --checkpoint-in has" in told
        only = ["finetune", "-m", f"{given}/m.gguf", "--lora-out", str(tmp_path / "b.gguf"), *resumed[-2:], "-n", "0"]
        assert run(capsys, *only, *ranks)[0] == 0
        code, told = run(capsys, *only, *flags.split())
        assert code == 2
        assert f"{flags}: the adapter of --checkpoint-in has" in told


def test_the_steps_number_stands_in_the_files_name_only(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a save with the number of a file that is read is refused before it takes its place."""
    folder = tmp_path / "at-it"
    folder.mkdir()
    names = "--pattern-fn-it it --fn-latest new"
    one = f"--file {given}/a.txt -c 8 -b 2 -t 1 --iterations 2 --save-every 0 {names}".split()
    files = ("-o", f"{folder}/m-it.gguf", "--checkpoint-out", f"{folder}/c-it.gguf")
    assert run(capsys, "finetune", "-m", f"{given}/m.gguf", *one, *files)[0] == 0
    assert {path.name for path in folder.iterdir()} == {"m-2.gguf", "m-new.gguf", "c-2.gguf", "c-new.gguf"}
    start = ("--checkpoint-in", f"{folder}/c-it.gguf")
    code, told = run(capsys, "finetune", "-m", f"{given}/m.gguf", *one, *files, *start)
    assert code == 0, told
    assert "going on after iteration 2" in told
    code, told = run(capsys, "finetune", "-m", f"{folder}/m-2.gguf", *one, *files)
    assert code == 1
    assert "m-2.gguf is the file of -m, and would take its place" in told


def test_plan_tells_the_memory_of_a_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_model(folder / "p.gguf", None, ModelShape(32, 2, 4, 2, 48, 0, n_ctx=64), seed=3)
    flags = ("finetune", "-m", str(folder / "p.gguf"), "-c", "16", "-t", "1", "--json")

    def plan(*words: str) -> dict[str, Any]:
        assert main(("plan", *words)) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    whole, adapter, larger = plan(*flags, "--full"), plan(*flags, "--lora-r", "2"), plan(*flags, "--full", "-b", "32")
    for report in (whole, adapter, larger):
        (cpu,) = report["devices"]
        assert cpu["total"] == sum(n for name, n in cpu.items() if name not in ("device", "total"))
        assert cpu["parameters"] == 4 * report["n_params"]
        assert cpu["optimizer"] == 8 * report["n_params"]
        assert report["process"] > 10 << 20
    ends = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]  # of the seven matrices of a layer
    assert adapter["n_params"] == 2 * 2 * sum(n_in + n_out for n_in, n_out in ends)
    assert larger["devices"][0]["arena"] > whole["devices"][0]["arena"]
    sizes = ("--embd", "32", "--layer", "2", "--head", "4", "--head-kv", "2", "--ff", "48")
    assert plan("train", *sizes, "-c", "16", "-t", "1", "--json")["devices"] == whole["devices"]
    code, told = run(capsys, "plan", *flags, "--full", "--lora-out", "a.gguf")
    assert code == 2
    assert "--lora-out is an adapter" in told


@pytest.mark.parametrize("kind", ["--lora-out", "-o"])
def test_a_run_that_is_killed_goes_on_to_the_same_bytes(
    kind: str, given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path

    def words(name: str) -> list[str]:
        (folder / name).mkdir(exist_ok=True)
        checkpoint = folder / name / "ck.gguf"
        files = f"-m {given}/m.gguf --file {given}/a.txt {kind} {folder / name}/out.gguf --checkpoint-in {checkpoint}"
        more = f"--checkpoint-out {checkpoint} -c 16 -b 2 -t 1 --save-every 2 --iterations 30 --seed 5"
        return f"finetune {files} {more}".split()

    whole, killed = f"whole{kind}", f"killed{kind}"
    assert run(capsys, *words(whole))[0] == 0
    process = subprocess.Popen([sys.executable, "-m", "logitless", *words(killed)], stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if "iter=7/" in line:
                process.kill()
                break
    assert process.returncode == -9
    code, told = run(capsys, *words(killed))
    assert code == 0, told
    assert "going on after iteration" in told
    for name in ("out.gguf", "ck.gguf"):
        assert (folder / killed / name).read_bytes() == (folder / whole / name).read_bytes()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--seed 5 --adam-iter 2 --stride 17", ""),
        (
            "--seed 6 --adam-iter 2 --stride 17",
            "; --seed 6 is not the checkpoint's 5, so other samples validate: their order begins anew",
        ),
        ("--seed 5 --adam-iter 2 --stride 18", "; the samples differ from the checkpoint's: their order begins anew"),
        (
            "--seed 5 --adam-iter 2 --stride 17 --force-reshuffle",
            "; --force-reshuffle is given: their order begins anew",
        ),
    ],
)
def test_a_resumed_run_tells_why_its_order_begins_anew(
    flags: str, reason: str, given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = f"--checkpoint-out {tmp_path}/ck.gguf --lora-out {tmp_path}/a.gguf -c 16 -b 2 -t 1"
    words = f"finetune -m {given}/m.gguf --file {given}/a.txt {checkpoint}"
    assert run(capsys, *f"{words} --seed 5 --adam-iter 1 --stride 17".split())[0] == 0
    code, err = run(capsys, *f"{words} --checkpoint-in {tmp_path}/ck.gguf {flags}".split())
    assert code == 0, err
    assert f"logitless: going on after iteration 1{reason}" in err


@pytest.mark.parametrize(("kind", "pattern"), [("--lora-out", "out.gguf"), ("-o", "out-ITERATION.gguf")])
def test_the_result_is_that_of_the_lowest_validation_loss(
    kind: str,
    pattern: str,
    given: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps from the fifth on have a rate that spoils the model; a run that goes on from there keeps the result."""
    monkeypatch.setattr(RATE, lambda _, i, *more: 1e-2 if i < 4 else 50.0)

    def fine(folder: str, flags: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        files = f"{kind} {tmp_path}/{folder}/{pattern} --checkpoint-out {tmp_path}/{folder}/ck.gguf"
        words = f"finetune -m {given}/m.gguf --file {given}/a.txt {files} -c 16 -b 2 -t 1 --val-split 0.3"
        code, err = run(capsys, *f"{words} --save-every 3 --stride 17 {flags}".split())
        assert code == 0, err
        return err

    def result(folder: str, step: int) -> bytes:
        return (tmp_path / folder / pattern.replace("ITERATION", str(step))).read_bytes()

    assert "which has the lowest" not in fine("few", "--validate-every 2 --adam-iter 4")
    best = tmp_path / "many" / pattern.replace("ITERATION", "4")
    line = f"logitless: {best} is of step 4, which has the lowest validation loss\n"
    assert line in fine("many", "--validate-every 2 --adam-iter 7")
    assert result("many", 4) == result("few", 4)
    assert line in fine("many", f"--validate-every 2 --adam-iter 9 --checkpoint-in {tmp_path}/many/ck.gguf")
    assert result("many", 4) == result("few", 4)
    again = f"--validate-every 2 --adam-iter 10 --seed 7 --checkpoint-in {tmp_path}/many/ck.gguf"
    assert line not in fine("many", again)  # other data validate
    if "ITERATION" in pattern:
        assert (tmp_path / "many" / "out-LATEST.gguf").read_bytes()[-2000:] == result("many", 10)[-2000:]
    else:
        assert result("many", 10) != result("few", 4)


@pytest.mark.parametrize(
    ("kind", "every", "step", "last"), [("--lora-out", 2, 4, 2), ("-o", 3, 5, 3), ("--lora-out", 9, 5, 0)]
)
def test_a_diverged_run_keeps_and_names_the_last_good_files(
    kind: str,
    every: int,
    step: int,
    last: int,
    given: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fourth step has a rate without bound. With --save-every 2 it would be saved; else the fifth finds it."""
    output, checkpoint = tmp_path / "out.gguf", tmp_path / "ck.gguf"
    words = f"finetune -m {given}/m.gguf --file {given}/a.txt {kind} {output} --checkpoint-out {checkpoint} -c 16 -b 2"
    limit = f"-t 1 --save-every {every} --adam-iter"
    expected = None
    if last:
        assert run(capsys, *f"{words} {limit} {last}".split())[0] == 0
        expected = output.read_bytes(), read_checkpoint(checkpoint).tensors
        output.unlink()
    monkeypatch.setattr(RATE, lambda c, i, *more: math.inf if i == 3 else rate_at(c, i, *more))
    limit += f" 8 --warmup {0}"
    code, err = run(capsys, *f"{words} {limit}".split())
    assert code == 1
    line = err.strip().splitlines()[-1]
    assert re.search(rf"logitless: the run diverged at step {step}: loss .*, gradient norm ", line)
    assert "norm=" in err
    if expected is None:
        assert line.endswith("; nothing was written")
        assert not output.exists()
        return
    assert line.endswith(f"; the last good state is that of step {last}: {output}, {checkpoint}")
    assert output.read_bytes() == expected[0]
    for name, values in read_checkpoint(checkpoint).tensors.items():
        np.testing.assert_array_equal(values, expected[1][name])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("finetune -m M", "finetune: give --lora-out FILE for an adapter, or -o FILE for the whole model"),
        ("finetune -m M --lora-out L", "--file FILE is required"),
        ("finetune -m M --lora-out /no/such/L --file T", "/no/such: no such folder"),
        ("finetune -m M --lora-out DIR --file T", "DIR: is not a regular file"),
        ("finetune -m M --lora-out M --file T", "--lora-out: m.gguf is the file of -m, and would take its place"),
        ("finetune -m M -o LINK --file T", "-o: LINK is the file of -m, and would take its place"),
        ("finetune -m M -o T --file T", "-o: a.txt is the file of --file, and would take its place"),
        ("finetune -m M -o O --file T --checkpoint-out M", "--checkpoint-out: m.gguf is the file of -m, and"),
        ("finetune -m M -o O --file T --checkpoint-out O", "--checkpoint-out: out.gguf is the file of -o, and"),
        ("finetune -m M -o O --file T --checkpoint-in O", "-o: out.gguf is the file of --checkpoint-in, and"),
        ("train --vocab-model M -o M --file T", "-o: m.gguf is the file of --vocab-model, and would take its place"),
        ("finetune -m M -o PIPE --file T", "PIPE: is not a regular file"),
        ("finetune -m M -o O --file T --checkpoint-out /proc/1/C", "/proc/1/C: cannot be written: "),
        ("finetune -m M -o O --file T --plot /no/such/x.svg", "/no/such: no such folder"),
        ("finetune -m M -o O --file T --pattern-fn-it= ", "--pattern-fn-it: '' must not be empty"),
        ("finetune -m M -o O --file T --pattern-fn-it out --fn-latest no/such", "no: no such folder"),
        ("finetune -m M -o O --file T --pattern-fn-it out --fn-latest m", "-o: m.gguf is the file of -m, and would"),
        ("synth --shape tiny -o PIPE", "PIPE: is not a regular file"),
        ("finetune -m M --lora-out L --file NONE", "NONE: No such file or directory"),
        ("train -o O --file T -c 100000", "fewer than the 100001 that one sample of 100000 needs"),
        ("finetune -m M --lora-out L --file T --plot x.gif", "--plot: 'x.gif' does not end in .svg or .png"),
        ("finetune -m M --lora-out L --file T --lora-r 0", "--lora-r: '0' is not a whole number from 1"),
        ("finetune -m M --lora-out L --only-write-lora", "needs --checkpoint-in FILE"),
        ("finetune -m M --lora-out L -n 0", "needs --checkpoint-in FILE"),
        ("finetune -m M --lora-out L -n 5", "-n: '5' is not one of 0"),
        ("finetune -m M --lora-out L --file T --checkpoint-in M", "no checkpoint"),
        ("train --file T", "train: -o FILE is required"),
        ("train --file T -o O --output-type q9", "--output-type: 'q9' is no type of a file; the types are F32,"),
        ("finetune -m M -o O --file T --output-type iq1_s", "--output-type: 'iq1_s' is not written here"),
        ("train --file T -o O --embd 30 --head 4 -c 16", "heads must be of an even, equal size"),
        ("export-lora -m M -o O", "--lora FILE or --lora-scaled FILE:SCALE is required"),
        ("export-lora -m M -o O -s M", "is not a file and a scale"),
        ("export-lora -m M -o O -s M x", "unexpected argument: x"),
        ("export-lora -m M -o DIR --lora M", "DIR: is not a regular file"),
        ("export-lora -m M -o O --lora M", "is not a LoRA adapter"),
        ("export-lora -m M -o M --lora T", "-o: m.gguf is the file of -m, and would take its place"),
        ("export-lora -m M -o T -s T 0.5", "-o: a.txt is the file of --lora, and would take its place"),
    ],
)
def test_user_error_is_one_line(words: str, told: str, given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {
        "M": "m.gguf",
        "T": "a.txt",
        "L": "out.gguf",
        "O": "out.gguf",
        "NONE": "NONE",
        "DIR": "DIR",
        "PIPE": "PIPE",
        "LINK": "LINK",
    }
    (given / "DIR").mkdir(exist_ok=True)
    if not (given / "PIPE").exists():
        os.mkfifo(given / "PIPE")
        (given / "LINK").symlink_to(given / "m.gguf")
    model = (given / "m.gguf").read_bytes()
    code, err = run(capsys, *(str(given / names[w]) if w in names else w for w in words.split()))
    assert code in (1, 2)
    assert told in err.replace(str(given) + "/", "")
    assert err.count("\n") == 1
    assert (given / "m.gguf").read_bytes() == model


def test_devices_are_opened_in_order_and_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, closed = [], []

    class Watched(CPUBackend):
        def close(self) -> None:
            closed.append(self.name)
            super().close()

    def opened(names: Sequence[str], threads: int) -> list[Backend]:
        asked.append((*names, threads))
        return [Watched(threads)]

    monkeypatch.setattr("logitless.backends.registry.open_backends", opened)
    o = parse([DEVICE, THREADS], ["--device", "opencl,cpu", "-t", "1"], {})
    with open_session(o):
        assert closed == []
    assert asked == [("opencl:0", "cpu", 1)]
    assert closed == ["cpu"]


def test_a_preference_is_learned_and_drawn(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed runs are tests/training/test_preference.py's."""
    rows = [{"prompt": f"{i} ", "chosen": "short", "rejected": "not short at all"} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["finetune", "-m", str(given / "m.gguf"), "--file", str(tmp_path / "pairs.jsonl"), "-t", "1"]
    words += ["--lora-out", str(tmp_path / "a.gguf"), "--plot", str(tmp_path / "loss.svg"), "-c", "32"]
    code, told = run(capsys, *words, "--method", "dpo", "--beta", "0.5", "-b", "6", "--epochs", "3", "-lr", "0.01")
    assert code == 0, told
    assert "dpo of 11 examples to train on, 1 to validate, 6 steps" in told
    losses = [float(x) for x in re.findall(r" loss=(\S+) accuracy=\S+ margin=\S+", told)]
    assert losses[0] == pytest.approx(0.693147, abs=1e-6)
    assert losses[-1] < 0.4 < losses[0]
    assert re.search(r"validation loss 0\.\d+, accuracy 100\.0 %", told)
    assert {"training", "validation", "accuracy", "validation accuracy"} <= set(
        re.findall(r">([a-z ]+)</text>", (tmp_path / "loss.svg").read_text())
    )
    for flags, problem in (
        (["--beta", "1"], "beta is of dpo, orpo, kto, simpo, reinforcement, and the method is supervised"),
        (["--method", "dpo", "--gamma", "1"], "gamma is of simpo, and the method is dpo"),
        (["--method", "dpo", "--file", str(given / "a.txt")], "a.txt: is a text, and dpo needs rows"),
        (["--method", "kto", "--file", str(tmp_path / "pairs.jsonl"), "--no-pack"], "--no-pack"),
    ):
        code, told = run(capsys, *words, *flags)
        assert code != 0, flags
        assert problem in told
    plan = main(["plan", *words[:5], "--full", "--method", "dpo", "-c", "32", "--json"])
    assert plan == 0
    assert json.loads(capsys.readouterr().out)["n_batch"] >= 1
