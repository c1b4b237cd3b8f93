"""Commands that run a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logitless.cli.commands.machine import selftest
from logitless.cli.commands.planning.dry_run import DryRunEngine
from logitless.cli.main import main
from logitless.engine.batch import StepResult, UBatch
from logitless.graph.backend import Backend
from logitless.graph.op import OPS
from logitless.graph.testing.conformance import OK, UNSUPPORTED, WRONG, Outcome, register_all
from logitless.models.adapters.lora import write_adapter
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from tests.helpers.commands import command as run
from tests.models.adapters.test_lora import random_adapter


def json_of(*args: str, code: int = 0) -> Any:
    got = run(*args)
    assert got.returncode == code, got.stderr.decode()
    return json.loads(got.stdout)


@pytest.fixture(scope="module")
def mini_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "mini.gguf"
    assert run("synth", "--shape", "mini", "--type", "Q8_0", "-o", str(path)).returncode == 0
    return str(path)


def test_generate_is_deterministic_and_shows_timings(mini_model: str) -> None:
    flags = ("generate", "-m", mini_model, "-p", "Hello", "-n", "12", "-t", "2")
    greedy = [run(*flags, "--temp", "0") for _ in range(2)]
    assert greedy[0].returncode == 0, greedy[0].stderr.decode()
    assert greedy[0].stdout == greedy[1].stdout
    assert b"prompt: " in greedy[0].stderr
    assert b"generated: 12 tokens" in greedy[0].stderr
    seeded = [run(*flags, "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert seeded[0] == seeded[1] != seeded[2]
    one_thread = run(*flags[:-1], "1", "--temp", "0")
    assert one_thread.stdout == greedy[0].stdout


def test_generate_reads_a_file(mini_model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Hello")
    flags = ("generate", "-m", mini_model, "-n", "4", "--temp", "0")
    assert run(*flags, "-f", str(file)).stdout == run(*flags, "-p", "Hello").stdout
    got = run(*flags, "-p", "Hello", "--display-prompt")
    assert got.stdout.startswith(b"Hello")


def test_generate_with_adapters(mini_model: str, tmp_path: Path) -> None:
    """One with a scale of 0 changes nothing; the merged model says what the adapter does."""
    adapter, merged = tmp_path / "a.gguf", tmp_path / "merged.gguf"
    with GGUFFile.open(mini_model) as base:
        write_adapter(adapter, random_adapter(base, 3, size=2.0), base, hparams_of(base))
    assert run("export-lora", "-m", mini_model, "--lora", str(adapter), "-o", str(merged)).returncode == 0
    flags = ("-p", "Hello", "-n", "6", "--temp", "0")
    plain, none, changed, other = (
        run("generate", "-m", *more, *flags).stdout
        for more in (
            (mini_model,),
            (mini_model, "--lora-scaled", f"{adapter}:0"),
            (mini_model, "--lora", str(adapter)),
            (str(merged),),
        )
    )
    assert plain == none != changed
    assert changed == other
    got = run("generate", "-m", mini_model, *flags, "--lora", mini_model)
    assert (got.returncode, got.stderr.count(b"\n")) == (1, 1), got.stderr.decode()
    assert b"is not a LoRA adapter" in got.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--samplers", "nonsense"], ["--samplers", "nonsense"]),
        (["--sampler-seq", "@"], ["--sampler-seq"]),
        (["-l", "5:2"], ["--logit-bias"]),
        (["-l", "999999+1"], ["--logit-bias"]),
        (["-ctk", "q8_0", "-f", "x"], ["-p TEXT"]),
    ],
)
def test_generate_refuses(mini_model: str, flags: list[str], words: list[str]) -> None:
    got = run("generate", "-m", mini_model, "-p", "x", "-n", "1", *flags)
    assert got.returncode == 2, got.stderr.decode()
    assert got.stderr.count(b"\n") == 1
    assert all(word in got.stderr.decode() for word in words), got.stderr.decode()


def test_plan_counts_every_byte(mini_model: str, tmp_path: Path) -> None:
    flags = ("plan", "-m", mini_model, "--json", "-ub", "32", "-c", "1024", "-ctk", "f32", "-ctv", "f16")
    report = json_of(*flags)
    (cpu,) = report["devices"]
    assert cpu["device"] == "cpu"
    assert cpu["total"] == cpu["weights"] + cpu["kv"] + cpu["arena"] + cpu["feeds"]
    cells = 1024 + 16  # one spare page
    assert cpu["kv"] >= cells * 2 * 2 * 64 * (4 + 2)  # layers × KV heads × head × bytes
    assert cpu["kv"] < 1.1 * cells * 2 * 2 * 64 * (4 + 2)
    assert cpu["ops"]["attention"] == 2
    assert json_of(*flags[:-4], "--no-alloc")["devices"][0]["kv"] < cpu["kv"]
    assert report["total"] == report["process"] + cpu["total"]
    few = ("plan", "-m", mini_model, "-ub", "32", "-np", "3", "--kv-unified-per-slot", "64", "--cache-ram", "7")
    per_slot = json_of(*few, "--json")
    assert (per_slot["n_ctx"], per_slot["prompts"]) == (192, 7 << 20)
    assert "up to 7.0 MiB more" in run(*few).stdout.decode()
    assert json_of(*few, "-cram", "-1", "--json")["prompts"] is None
    on_disk = run(*few, "-cram", "-1", "--cache-disk", str(tmp_path), "--cache-disk-size", "3").stdout.decode()
    assert "(--cache-ram): as much as there is\n" in on_disk
    assert "(--cache-disk): up to 3.0 MiB of files\n" in on_disk
    assert not list(tmp_path.iterdir())  # its dry run computes no keys and values


def test_plan_measures_a_server_whose_slots_are_all_busy(
    mini_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[int] = []
    step = DryRunEngine.step

    def counted(self: DryRunEngine, batch: UBatch) -> StepResult:
        rows.append(len(batch.out))
        return step(self, batch)

    monkeypatch.setattr(DryRunEngine, "step", counted)
    assert main(("plan", "-m", mini_model, "-c", "256", "-np", "3", "-kvu", "-t", "1", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["n_slots"] == 3
    assert max(rows) == 3
    assert sum(rows) == 3 + 3 * 39  # one token of each long prompt, then half of five pages but one cell


def test_a_context_that_cannot_fit_is_refused(mini_model: str) -> None:
    got = run("plan", "-m", mini_model, "-c", str(2**30))
    assert got.returncode == 1
    assert got.stderr.startswith(b"logitless: --ctx-size 1073741824: ")


def test_a_context_beyond_the_training_context_is_served_with_a_warning(mini_model: str) -> None:
    got = run("generate", "-m", mini_model, "-c", "1000000", "-n", "1", "-p", "a")
    assert got.returncode == 0
    warnings = [line for line in got.stderr.splitlines() if line.startswith(b"logitless: warning: ")]
    assert len(warnings) == 1
    assert b" 1000000 tokens, the model was trained on " in warnings[0]
    assert b"warning" not in run("generate", "-m", mini_model, "-c", "64", "-n", "1", "-p", "a").stderr


def test_selftest_of_a_model(mini_model: str) -> None:
    report = json_of("selftest", "-m", mini_model, "--json")
    assert report["device"] == "cpu"
    assert {o["status"] for o in report["ops"]} == {"ok"}
    assert {"linear", "attention", "rms_norm", "sample"} <= {o["op"] for o in report["ops"]}
    assert {"op", "case", "status", "error"} <= set(report["ops"][0])


def test_selftest_of_named_ops() -> None:
    report = json_of("selftest", "--op", "add", "--op", "reshape", "--json")
    assert {o["op"] for o in report["ops"]} == {"add", "reshape"}
    got = run("selftest", "--op", "nonsense")
    assert got.returncode == 2
    assert b"nonsense" in got.stderr


def test_selftests_columns_never_run_together() -> None:
    register_all()
    name = max(OPS, key=len)
    cases = [Outcome("add", "x", OK, 0.0), *(Outcome(name, "x", status, 0.5) for status in (OK, WRONG, UNSUPPORTED))]
    lines = selftest.as_text(cases).splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["add", name]
    assert "  1 ok, 1 wrong, 1 unsupported  worst error " in lines[1]
    assert lines[0].index("worst") == lines[1].index("worst")


def test_bench(mini_model: str) -> None:
    report = json_of("bench", "-m", mini_model, "-p", "32", "-n", "4", "-b", "1,2", "-t", "1,2", "-r", "1", "--json")
    assert set(report) == {"machine", "rows"}
    assert set(report["machine"]) == {"read_gb_s", "int8_gmac_s", "f32_gmac_s"}
    assert all(value > 0 for value in report["machine"].values())
    tests = [(r["test"], r["batch"], r["threads"]) for r in report["rows"]]
    assert sorted(tests) == sorted((t, b, n) for t in ("pp32", "tg4") for b in (1, 2) for n in (1, 2))
    for row in report["rows"]:
        assert set(row) == {"test", "batch", "threads", "tok_s", "limit_fraction"}
        assert row["tok_s"] > 0
        assert (
            row["limit_fraction"] > 0
        )  # may exceed 1: these weights stay in the cache (see tests/cli/commands/test_bench_limits.py)


def test_bench_on_a_device_tells_no_limits(mini_model: str, open_device: Callable[[str], Backend]) -> None:
    """What is measured of the machine is the CPU's."""
    open_device("vulkan:0")
    words = ["bench", "-m", mini_model, "--device", "vulkan:0", "-p", "8", "-n", "0", "-r", "1", "--ops", "--json"]
    (row,) = json_of(*words)["rows"]
    assert row["tok_s"] > 0
    assert row["limit_fraction"] is None
    assert {(r["bandwidth_fraction"], r["peak_fraction"]) for r in row["ops"]} == {(None, None)}


def test_bench_of_ops(mini_model: str) -> None:
    (row,) = json_of("bench", "-m", mini_model, "-p", "16", "-d", "20", "-n", "0", "-r", "1", "--ops", "--json")["rows"]
    assert row["test"] == "pp16 @ d20"
    ops = {r["op"]: r for r in row["ops"]}
    assert set(row["ops"][0]) == {"op", "calls", "ms", "share", "bandwidth_fraction", "peak_fraction"}
    assert sum(r["share"] for r in row["ops"]) == pytest.approx(1, abs=0.01)
    assert ops["attention"]["calls"] == 2
    assert ops["attention"]["peak_fraction"] > 0
    assert ops["between ops"]["ms"] > 0
    assert any(name.startswith("linear_q8 q8_0 ") for name in ops)
