"""Graders: rewards, refusals, and harm that they cannot do."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rapidfuzz import fuzz

from logitless.engine.async_engine import AsyncEngine
from logitless.frontend.graders import surroundings
from logitless.server.config import ServerConfig
from logitless.training.graders import remote, sandbox, sandbox_child
from logitless.training.graders.grade import Grade, GradedSample, GradeFault, GraderError, Surroundings, graded
from logitless.training.graders.parse import parse_grader
from logitless.training.graders.remote import server_at

ALL = Surroundings(frozenset({"endpoint", "python"}))
CHECK = {"type": "string_check", "name": "c", "input": "{{ sample.output_text }}", "reference": "{{item.word}}"}
PYTHON = {"type": "python", "name": "p"}
ITEM = {"word": "Cat", "deep": {"list": [1, {"x": 2.5}]}}


def grade(spec: Mapping[str, Any], text: str, item: Mapping[str, Any] = ITEM, around: Surroundings = ALL) -> Grade:
    return graded(parse_grader(spec, around), GradedSample(text), item)


@pytest.mark.parametrize(
    ("operation", "text", "reward"),
    [
        ("eq", "Cat", 1), ("eq", "cat", 0), ("ne", "Cat", 0), ("ne", "dog", 1),
        ("like", "a Cat sat", 1), ("like", "a cat sat", 0), ("ilike", "a cAT sat", 1), ("ilike", "a dog", 0),
    ],
)  # fmt: skip
def test_texts_are_compared(operation: str, text: str, reward: float) -> None:
    assert grade({**CHECK, "operation": operation}, text) == Grade(reward)


def test_templates_reach_into_answer_and_item() -> None:
    def text_of(template: str, text: str = '{"a": [3, "b"]}') -> Grade:
        return grade({**CHECK, "operation": "eq", "input": template}, text, {**ITEM, "word": "2.5 b"})

    assert text_of("{{ item.deep.list[1].x }} {{sample.output_json.a[1]}}").reward == 1
    assert text_of("{{ item.nothing }}").errors == {"invalid_variable_error": "there is no item.nothing"}
    assert text_of("{{ sample.output_json.a[7] }}").reward == 0
    assert "there is no sample.output_json.a" in text_of("{{ sample.output_json.a }}", "no JSON").problem
    with pytest.raises(GraderError, match=r"grader\.input: .* system .* is not like"):
        text_of("{{ system }}")


def test_similarities_are_rapidfuzz_own() -> None:
    spec = {"type": "text_similarity", "name": "s", "input": "{{sample.output_text}}", "reference": "{{item.word}}"}
    result = grade({**spec, "evaluation_metric": "fuzzy_match"}, "a cat")
    assert result.reward == fuzz.ratio("a cat", "Cat") / 100
    assert grade({**spec, "evaluation_metric": "levenshtein"}, "Cut").reward == pytest.approx(2 / 3)
    slow = grade({**spec, "evaluation_metric": "partial_ratio"}, "a" * 4_000_000)
    assert "s: texts of 4000000 and 3 characters are too long" in slow.problem
    with pytest.raises(GraderError, match=r"grader\.evaluation_metric: bleu is not there; fuzzy_match"):
        grade({**spec, "evaluation_metric": "bleu"}, "")


def multi(formula: str, **graders: Any) -> dict[str, Any]:
    given = graders or {"a": {**CHECK, "operation": "like"}, "b": {**CHECK, "operation": "eq"}}
    return {"type": "multi", "name": "m", "graders": given, "calculate_output": formula}


def test_formulas_combine_rewards() -> None:
    result = grade(multi("0.5*a + max(b, -2^2, 0) / 4 + sqrt(4)"), "a Cat")
    assert (result.reward, result.parts) == (2.5, {"a": 1.0, "b": 0.0})
    assert grade(multi("a / b"), "a Cat").errors.keys() == {"formula_parse_error"}
    assert grade(multi("exp(1000*a)"), "a Cat").errors.keys() == {"formula_parse_error"}
    for formula, told in (
        ("a + c", "'c' is not one of the graders a, b"),
        ("a.b", "may have numbers"),
        ("__import__('os')", "may have numbers"),
        ("a +", "is no formula"),
        ("sqrt(a, b)", "sqrt takes one argument"),
        ("9" * 3000, "more than 2000 characters"),
    ):
        with pytest.raises(GraderError, match=r"grader\.calculate_output: ") as error:
            grade(multi(formula), "")
        assert told in str(error.value)
    fails = {**CHECK, "operation": "eq", "input": "{{ item.no }}"}
    assert grade(multi("f", f=fails), "").problem == "f: there is no item.no"
    alone = {**multi("c * 2"), "graders": {**CHECK, "operation": "eq"}}  # as the client's types have it
    assert grade(alone, "Cat").reward == 2


def test_wrong_grader_is_refused_with_its_reason() -> None:
    for spec, told in (
        ([], "grader: must be an object"),
        ({"type": "best"}, "grader.type: must be one of string_check"),
        ({**CHECK, "operation": "gt"}, "grader.operation: must be one of eq"),
        ({**CHECK, "operation": "eq", "more": 1}, "grader.more: is not known"),
        ({**PYTHON, "source": "def grade(:"}, "grader.source: invalid syntax"),
        ({"type": "endpoint", "url": "file:///etc/passwd"}, "grader.url: must be an http"),
        (multi("a", a=multi("b")), "grader.graders.a: a multi grader has none of its own kind"),
        (multi("a", a={**CHECK, "operation": 3}), "grader.graders.a.operation: must be a string"),
        ({"type": "score_model"}, "grader.type: no model can be asked here"),
    ):
        with pytest.raises(GraderError) as error:
            parse_grader(spec, ALL)
        assert str(error.value).startswith(told)
    for kind in ("python", "endpoint"):
        with pytest.raises(GraderError, match=f"{kind} graders are off: start with --allow-graders {kind}"):
            parse_grader({"type": kind})


def answering(said: str) -> Surroundings:
    def complete(model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> tuple[str, int]:
        assert (model, [m["content"] for m in messages]) == ("judge", ["Is it Cat?"])
        assert sampling == {"seed": 1}
        return said, 12

    return Surroundings(complete=complete)


def test_models_score() -> None:
    spec = {
        "type": "score_model", "name": "j", "model": "judge", "range": [0, 5], "sampling_params": {"seed": 1},
        "input": [{"role": "user", "content": "Is it {{sample.output_text}}?"}],
    }  # fmt: skip
    assert grade(spec, "Cat", around=answering('{"result": 3.5}')) == Grade(3.5, tokens={"judge": 12})
    assert grade(spec, "Cat", around=answering('{"result": 7}')).reward == 5
    for said in ("3.5", "no", '{"result": "3"}', '{"result": true}', "[]"):
        assert grade(spec, "Cat", around=answering(said)).errors.keys() == {"model_grader_parse_error"}
    with pytest.raises(GraderError, match=r"grader\.range: the first number"):
        grade({**spec, "range": [1, 1]}, "", around=answering(""))


# -- python


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("return item['deep']['list'][1]['x'] + len(sample['output_text'])", 5.5),
        ("print('aloud'); return True", 1.0),
        ("import numpy; return numpy.float32(0.5)", 0.5),
    ],
)
def test_python_gives_a_reward(body: str, reward: float) -> None:
    assert grade({**PYTHON, "source": f"def grade(sample, item):\n    {body}"}, "Cat") == Grade(reward)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return float('nan')", "the reward is nan"),
        ("return -float('inf')", "the reward is -inf"),
        ("return 'much'", "ValueError"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "ended without a reward"),
        ("return len(bytearray(4 << 30))", "MemoryError"),
        ("import socket; socket.socket(); return 1", "PermissionError"),
        ("import os; os.fork(); return 1", "PermissionError"),
        ("import os; os.execv('/bin/sh', ['sh']); return 1", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9); return 1", "PermissionError"),
        ("open(item['path'], 'w'); return 1", "PermissionError"),
        ("import os; os.unlink(item['path']); return 1", "PermissionError"),
        ("import os; return os.environ['SECRET']", "KeyError"),
    ],
)
def test_python_cannot_do_harm(body: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    (tmp_path / "kept").write_text("kept")
    source = f"def grade(sample, item):\n    {body}"
    result = grade({**PYTHON, "source": source}, "Cat", {"path": str(tmp_path / "kept")})
    assert result.reward == 0
    assert told in result.problem
    assert (tmp_path / "kept").read_text() == "kept"


SERVER = os.getpid()
_X86_64 = {  # calls that reach other processes, files or the system, with arguments that would work
    "tgkill": (234, SERVER, SERVER, 0), "kill": (62, SERVER, 0), "tkill": (200, SERVER, 0),
    "rt_sigqueueinfo": (129, SERVER, 0, 0), "rt_tgsigqueueinfo": (297, SERVER, SERVER, 0, 0),
    "pidfd_open": (434, SERVER, 0), "pidfd_send_signal": (424, 0, 0, 0, 0), "ptrace": (101, 16, SERVER, 0, 0),
    "process_vm_readv": (310, SERVER, 0, 0, 0, 0, 0), "process_madvise": (440, 0, 0, 0, 0, 0), "kcmp": (312, SERVER, 0),
    "prlimit64": (302, SERVER, 7, 0, 0), "prlimit64 of its own": (302, 0, 7, 1, 0), "setrlimit": (160, 7, 0),
    "setpriority": (141, 0, SERVER, 0), "sched_setaffinity": (203, SERVER, 0, 0), "sched_setscheduler": (144, SERVER),
    "sched_setattr": (314, SERVER), "ioprio_set": (251, 1, SERVER, 0), "setpgid": (109, 0, 0), "setsid": (112,),
    "shmget": (29, 1, 4096, 0), "shmat": (30, 0, 0, 0), "semget": (64, 1, 1, 0), "msgget": (68, 1, 0),
    "mq_open": (240, b"/x", 0), "memfd_create": (319, b"x", 0), "keyctl": (250, 0), "bpf": (321, 0),
    "utime": (132, b"/tmp", 0), "utimes": (235, b"/tmp", 0), "utimensat": (280, -100, b"/tmp", 0, 0),
    "fchmodat2": (452, -100, b"/tmp", 0o777, 0), "chmod": (90, b"/tmp", 0o777), "fchmod": (91, 0, 0o777),
    "open": (2, b"/tmp", 0), "creat": (85, b"/tmp/x", 0), "truncate": (76, b"/tmp/x", 0), "ftruncate": (77, 0, 0),
    "mkdir": (83, b"/tmp/x", 0), "renameat2": (316, -100, b"/tmp/x", -100, b"/tmp/y", 0), "flock": (73, 0, 2),
    "fcntl F_SETOWN": (72, 0, 8, SERVER), "fcntl F_SETLK": (72, 0, 6, 0), "ioctl TIOCSTI": (16, 0, 0x5412, b"x"),
    "socket": (41, 1, 1, 0), "socketpair": (53, 1, 1, 0, 0), "io_uring_setup": (425, 1, 0), "inotify_init": (253,),
    "fork": (57,), "vfork": (58,), "clone": (56, 17, 0), "execve": (59, b"/bin/true", 0, 0), "unshare": (272, 1 << 28),
    "setns": (308, 0, 0), "mount": (165, 0, 0, 0, 0, 0), "chroot": (161, b"/"), "setuid": (105, 0),
    "capset": (126, 0, 0), "prctl": (157, 1, 9), "seccomp": (317, 1, 0, 0), "personality": (135, 0), "sync": (162,),
    "swapon": (167, b"/x", 0), "mount_setattr": (442, 0), "landlock_create_ruleset": (444, 0, 0, 1),
    "a number of x32": (0x40000000,),
}  # fmt: skip


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are x86_64's")
def test_python_has_no_call_that_reaches_beyond_its_process() -> None:
    """Each gets EPERM, and so does any number that is not in the list."""
    source = f"""
import ctypes, errno
def grade(sample, item):
    call = ctypes.CDLL(None, use_errno=True).syscall
    given = {{**{_X86_64!r}, **{{str(n): (n, *[0] * 6) for n in item['others']}}}}
    through = []
    for name, arguments in given.items():
        ctypes.set_errno(0)
        if call(*arguments) != -1 or ctypes.get_errno() != errno.EPERM:
            through.append(f"{{name}}: {{ctypes.get_errno()}}")
    assert not through, through
    return len(given)
"""
    machine = sandbox_child._MACHINES["x86_64"]
    answered = {sandbox_child._CLONE3, sandbox_child._OPENAT2, 335, 336}  # ENOSYS; signals of probes
    some = {machine.openat, machine.fcntl, machine.prlimit}  # allowed with zeros
    others = sorted({*range(500)} - {*machine.allowed} - answered - some)
    result = grade({**PYTHON, "source": source}, "Cat", {"others": others})
    assert not result.problem
    assert result.reward == len(_X86_64) + len(others)


@pytest.mark.parametrize("file", ["environ", "mem"])
def test_python_reads_no_memory_of_the_server(file: str) -> None:
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({sandbox_child._NEW_USER}) != 0)"
    if os.getuid() and subprocess.run([sys.executable, "-c", code]).returncode:
        pytest.skip("the system gives no user namespaces")
    source = f"def grade(sample, item):\n    open('/proc/{SERVER}/{file}', 'rb').read(1)\n    return 1"
    assert "PermissionError" in grade({**PYTHON, "source": source}, "Cat").problem


@pytest.mark.parametrize(
    "body",
    [
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
        "from concurrent.futures import ThreadPoolExecutor as P\n    assert [*P(3).map(abs, [-1, 2])] == [1, 2]",
        "import numpy as np; np.linalg.svd(np.random.default_rng(0).normal(size=(300, 300)))",
        "import time, datetime; time.sleep(0.001); datetime.datetime.now()",
        "import os, json, statistics; open(statistics.__file__).read(); os.listdir('/'); os.cpu_count(); os.getcwd()",
        "import random, secrets, uuid, hashlib, decimal; secrets.token_hex(); uuid.uuid4(); decimal.Decimal(1) / 3",
        "import resource, platform, locale; resource.getrlimit(7); platform.platform(); locale.getlocale()",
        "import signal; signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(0, 0.001); signal.pause()",
        "import mmap; mmap.mmap(-1, 4096)[0] = 1",
        "import select, os; r, w = os.pipe(); os.write(w, b'x'); assert select.select([r], [], [], 1)[0]",
    ],
)
def test_python_computes_with_the_calls_of_the_list(body: str) -> None:
    result = grade({**PYTHON, "source": f"def grade(sample, item):\n    {body}\n    return 1"}, "Cat")
    assert result == Grade(1.0)


def test_python_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 1.0)
    result = grade({**PYTHON, "source": "def grade(sample, item):\n    while True: pass"}, "Cat")
    assert result.errors.keys() == {"python_grader_runtime_error"}


def test_python_needs_its_function() -> None:
    assert "has no function grade(sample, item)" in grade({**PYTHON, "source": "grade = 1"}, "Cat").problem


# -- endpoints


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[dict[str, Any]], list[bytes]]]:
    """(address, bodies that came, answers to give)."""
    came: list[dict[str, Any]] = []
    answers: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = answers.pop(0)
            status = int(answer) if answer.isdigit() else 200
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", came, answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_endpoints_give_rewards(endpoint: tuple[str, list[dict[str, Any]], list[bytes]]) -> None:
    url, came, answers = endpoint
    answers += [
        b'{"score": 0.25}',
        b"500",
        b"302",
        b'{"score": null}',
        b'{"score": NaN}',
        b'{"score": 1e999}',
        b"much",
        b"[1]",
    ]
    spec = {"type": "endpoint", "url": url, "headers": {"X-Key": "k"}}
    assert grade(spec, "Cat") == Grade(0.25)
    assert came[0]["item"] == ITEM
    assert came[0]["sample"]["output_text"] == "Cat"
    for told in ("answers 500", "answers 302", *["did not answer"] * 3, "Expecting value", "did not answer"):
        assert told in grade(spec, "Cat").problem


def test_other_servers_models_are_asked(endpoint: tuple[str, list[dict[str, Any]], list[bytes]]) -> None:
    url, came, answers = endpoint
    said = {"choices": [{"message": {"content": '{"result": 1}'}}], "usage": {"total_tokens": 9}}
    answers += [json.dumps(said).encode(), b"{}"]
    complete = server_at(url, "key")
    sampling = {"temperature": 0, "max_completions_tokens": 4}
    assert complete("judge", [{"role": "user", "content": "?"}], sampling) == ('{"result": 1}', 9)
    assert (came[0]["model"], came[0]["max_completion_tokens"]) == ("judge", 4)
    assert came[0]["response_format"]["type"] == "json_schema"
    with pytest.raises(GradeFault, match="answers no completion"):
        complete("judge", [], {})


def test_endpoints_that_hang_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.Endpoint, "SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and says nothing
        spec = {"type": "endpoint", "url": f"http://127.0.0.1:{server.getsockname()[1]}"}
        assert "took more than 0.05 seconds" in grade(spec, "Cat").problem
    assert grade(spec, "Cat").errors.keys() == {"other_error"}  # nobody listens there now


def test_an_endpoint_of_a_private_network_is_refused_and_never_asked(
    endpoint: tuple[str, list[dict[str, Any]], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name when the job is made; by its address when it is asked, also after the name has changed."""
    url, came, answers = endpoint
    config = ServerConfig(allow_graders=("endpoint",))
    around = surroundings(AsyncEngine(), config)
    hosts = ("127.0.0.1", "127.1", "0x7f.1", "2130706433", "[::1]", "[::ffff:10.0.0.1]", "169.254.169.254", "localhost")
    for host in (*hosts, "10.1.2.3", "x.localhost", "[64:ff9b::7f00:1]"):
        with pytest.raises(GraderError, match=r"grader\.url: is no public address"):
            parse_grader({"type": "endpoint", "url": f"http://{host}:1/x"}, around)
    named = parse_grader({"type": "endpoint", "url": url.replace("127.0.0.1", "reward.example")}, around)
    addresses = iter(["127.0.0.1", "8.8.8.8"])  # the second name server lies, and leads to this machine then

    def resolve(host: str, port: Any, *args: Any, **flags: Any) -> list[Any]:
        address = next(addresses, "127.0.0.1")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for _ in range(2):
        with pytest.raises(GradeFault, match="no public address"):
            named.grade(GradedSample("x"), {})
    assert came == []
    monkeypatch.undo()
    own = surroundings(AsyncEngine(), replace(config, private_addresses=True))
    answers.append(b'{"score": 0.5}')
    assert parse_grader({"type": "endpoint", "url": url}, own).grade(GradedSample("x"), {}).reward == 0.5
    public = parse_grader({"type": "endpoint", "url": "https://reward.example/x"}, around)
    assert public.kind == "endpoint"
