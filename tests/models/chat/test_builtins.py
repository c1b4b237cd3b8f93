"""Templates by name: those of llama-server, as llama.cpp's own formatter writes them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest

from logitless.models.chat.builtins import BUILTINS
from logitless.models.chat.template import ChatTemplate

NAMES = """
bailing bailing-think bailing2 chatglm3 chatglm4 chatml command-r deepseek deepseek-ocr deepseek2 deepseek3
exaone-moe exaone3 exaone4 falcon3 gemma gigachat glmedge gpt-oss granite granite-4.0 granite-4.1 grok-2
hunyuan-dense hunyuan-moe hunyuan-vl kimi-k2 llama2 llama2-sys llama2-sys-bos llama2-sys-strip llama3 llama4
megrez minicpm mistral-v1 mistral-v3 mistral-v3-tekken mistral-v7 mistral-v7-tekken monarch openchat orion
pangu-embedded phi3 phi4 rwkv-world seed_oss smolvlm solar-open vicuna vicuna-orca yandex zephyr
"""  # of llama-server's README, --chat-template
S, U, A, V = ("system", " Be good. "), ("user", " One "), ("assistant", " Two "), ("user", " Three ")
TALKS = [[S, U, A, V], [U, A, V], [U], [S, U], [U, A], [S, U, A, V, A, U]]
FORMAT = """
import ctypes, importlib.util, json, pathlib, sys
folder = pathlib.Path(importlib.util.find_spec("xllamacpp").origin).parent
format = ctypes.CDLL(str(next(folder.glob("*.so")))).llama_chat_apply_template
class Message(ctypes.Structure):
    _fields_ = [("role", ctypes.c_char_p), ("content", ctypes.c_char_p)]
text = ctypes.c_char_p
format.argtypes = [text, ctypes.POINTER(Message), ctypes.c_size_t, ctypes.c_bool, text, ctypes.c_int32]
told, room = [], ctypes.create_string_buffer(1 << 16)
for name, talk, add in json.load(sys.stdin):
    messages = (Message * len(talk))(*[Message(role.encode(), text.encode()) for role, text in talk])
    n = format(name.encode(), messages, len(talk), add, room, len(room))
    told.append(room.raw[:n].decode() if n >= 0 else None)
print(json.dumps(told))
"""


def test_all_names_of_llama_server_are_there() -> None:
    assert sorted(BUILTINS) == sorted(NAMES.split())


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
def test_texts_are_llama_cpps() -> None:
    cases = [(name, talk, add) for name in BUILTINS for talk in TALKS for add in (True, False)]
    done = subprocess.run(
        [sys.executable, "-c", FORMAT], input=json.dumps(cases), capture_output=True, text=True, timeout=60
    )
    if done.returncode == -signal.SIGILL:
        pytest.skip("the package of llama.cpp is not built for this processor")
    for (name, talk, add), expected in zip(cases, json.loads(done.stdout), strict=True):
        if name == "yandex" and talk[0] is S:
            continue  # it drops system messages, which are put in front of the user's here
        template = ChatTemplate(BUILTINS[name], bos_token="", eos_token="</s>")
        messages = [{"role": role, "content": text} for role, text in talk]
        assert template.render(messages, add_generation_prompt=add) == expected, name
