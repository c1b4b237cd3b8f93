"""Command line for documentation tests: one process with the imports, forked for each command, behind a Unix socket.

`python command_forks.py SOCKET` serves it. `logitless` and `python` of a shell are `logitless_client` below. A request
has words, a folder, an environment and the three standard streams; the answer is the exit code. A command that would
serve is started on a free port, asked /health and ended; with `stay` its address is answered, and it runs until the
connection closes."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import urllib.request
import warnings
from collections.abc import Iterable
from pathlib import Path

MODELS_OF_THE_HUB = ("-hf", "--hf-repo")
CLIENT = """#!{python} -SIE
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
words = [{program!r}, *sys.argv[1:]]
request = json.dumps([words, os.getcwd(), dict(os.environ), False]).encode()
socket.send_fds(connection, [request], [0, 1, 2])
sys.exit(int(connection.recv(64) or b"70"))
"""


def request(address: str, words: list[str], folder: Path, environment: dict[str, str], stay: bool) -> socket.socket:
    """Send a command; its standard output and error are ours."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    with open(os.devnull, "rb") as nothing, open(folder / "server.log", "wb") as log:
        body = json.dumps([words, str(folder), environment, stay]).encode()
        socket.send_fds(connection, [body], [nothing.fileno(), log.fileno(), log.fileno()])
    return connection


def local(words: list[str]) -> list[str]:
    """The words with the model of the folder in place of the hub's, one thread, a free port, and a short run."""
    words = [*words]
    for at, word in enumerate(words[:-1]):
        if word in MODELS_OF_THE_HUB:
            words[at : at + 2] = ["-m", "model.gguf"]
    if words[0] in ("serve", "rpc-server"):
        words += ["--port", "0"]
    if words[0] == "finetune" and "--epochs" not in words:
        words += ["--adam-iter", "1"]
    if "reinforcement" in words:
        words += ["--max-completion-tokens", "4"]
    if words[0] == "bench":
        words += ["-r", "1"]
    if "--workers" in words:
        words += ["--workers", "2"]
    if words[0] in ("serve", "bench", "finetune", "generate", "imatrix", "perplexity") and "-t" not in words:
        words += ["-t", "1"]
    return words


def run(words: list[str]) -> int:
    """Run a command in this process."""
    try:
        if words[0] == "python":
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "rows of .* no multiple of 256")  # the model is small
            exec(compile(words[2], "<block>", "exec"), {"__name__": "__main__"})
            return 0
        from logitless.cli.main import main

        code = main(local(words[1:]))
        return 0 if words[1:] == ["doctor"] else code  # 1 tells of a problem of this machine
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()


def serve(words: list[str], connection: socket.socket, stay: bool) -> int:
    """Start a server, wait until it is healthy, and end it."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        connection.close()
        os.dup2(writing, 2)
        os._exit(run(words))
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as log:
        for line in log:
            os.write(2, line.encode())
            if found := re.search(r"listening on (?:(http://\S+)|\S+:(\d+))", line):
                break
        else:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or 1
        rest = threading.Thread(target=copy, args=(log,))  # a full pipe would stop the server
        rest.start()
        if url := found[1]:
            while health(url) == 503:
                time.sleep(0.01)
        if stay:
            connection.sendall(url.encode())
            connection.recv(1)
        os.kill(pid, signal.SIGTERM)
        rest.join()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def copy(log: Iterable[str]) -> None:
    """Write the lines of a log to standard error."""
    for line in log:
        os.write(2, line.encode())


def health(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


def answer(connection: socket.socket) -> None:
    """Serve one request in a fork."""
    body, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    words, folder, environment, stay = json.loads(body)
    if os.fork():
        for stream in streams:
            os.close(stream)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for at, stream in enumerate(streams):
        os.dup2(stream, at)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    serving = words[0] == "logitless" and words[1:2] in (["serve"], ["rpc-server"])
    code = serve(words, connection, stay) if serving else run(words)
    with contextlib.suppress(OSError):
        connection.sendall(str(code).encode())
    os._exit(0)


def main(address: str) -> None:
    for module in ("anthropic", "ollama", "openai", "logitless.serving", "logitless.cli.commands.serve"):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            with connection:
                answer(connection)


if __name__ == "__main__":
    main(sys.argv[1])
