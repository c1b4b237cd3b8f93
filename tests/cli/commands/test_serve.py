"""`logitless serve`: the kind of server that flags select, and flags that print and exit."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from logitless.cli.commands import serve
from logitless.cli.flags.flags import parse
from logitless.cli.flags.options import SERVE
from logitless.cli.main import main
from tests.helpers.hub_cache import HubCache

# a start whose threads import and compile for ever
LOADING = """
import asyncio, threading
from logitless.cli.commands import serve
from logitless.cli.main import main

async def load(*_):
    print("loading", flush=True)
    while True:
        await asyncio.to_thread(input)
        print("goes on", flush=True)
        await asyncio.to_thread(threading.Event().wait)

serve._serve = load
main(["serve", "--demo"])
"""
FLAGS = [flag for group in SERVE for flag in group.flags]


@pytest.mark.parametrize(
    ("words", "router"),
    [
        ([], False),  # the demo
        (["--models-max", "2"], True),
        (["--no-models-autoload"], True),
        (["--models-max", "2", "-m", "x.gguf"], False),
        (["--models-max", "2", "--demo"], False),
    ],
)
def test_flags_of_a_router_mean_one_where_no_model_is_downloaded_yet(
    hub_cache: HubCache, words: list[str], router: bool
) -> None:
    assert serve._wants_router(parse(FLAGS, words, {})) is router


def test_lists_the_downloaded_models(hub_cache: HubCache, capsys: pytest.CaptureFixture[str]) -> None:
    for quant in ("Q8_0", "Q4_K_M"):
        hub_cache("u/r", f"r-{quant}.gguf")
    for flag in ("--cache-list", "-cl"):
        assert main([flag]) == 0
        assert sorted(capsys.readouterr().out.split()) == ["u/r:Q4_K_M", "u/r:Q8_0"]


def test_prints_the_completion_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion-bash"]) == 0
    told = capsys.readouterr().out
    assert main(["completion", "bash"]) == 0
    assert told.strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_a_start_at_once_and_a_hang_up_does_not(number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-c", LOADING]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGHUP)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "goes on\n"
            process.send_signal(number)
            assert process.wait(20) == status
        finally:
            process.kill()
