"""Pre-tokenizers against llama.cpp's: ids of random texts over a vocabulary in which a piece shows its borders."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import gguf
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from logitless.models import tokenizer as tokenizers
from logitless.models.gguf.file import GGUFFile
from logitless.models.tokenizer.pretokenizers import PRE_TOKENIZERS
from tests.helpers.llama_cpp_library import needs_llama_cpp

ALPHABET = "1 aB's\n-"
SPACES_BEFORE_DIGITS = re.compile(r"\s\s[0-9]")
"""llama.cpp's own digit splitter (tiny_aya, afmoe) leaves the white space in the piece of the digits,
which the models' tokenizer.json does not."""
NAMES = [name for name, pre in PRE_TOKENIZERS.items() if pre.byte_level]
CHILD = """
import ctypes, json, sys
lib, pointer = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p
class Parameters(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]
quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda *_: None)
lib.llama_log_set(quiet, None)
lib.llama_model_default_params.restype = Parameters
lib.llama_model_load_from_file.restype = lib.llama_model_get_vocab.restype = pointer
lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Parameters]
lib.llama_model_get_vocab.argtypes = [pointer]
lib.llama_tokenize.argtypes = [pointer, ctypes.c_char_p, ctypes.c_int32, pointer, ctypes.c_int32, *[ctypes.c_bool] * 2]
parameters, buffer = lib.llama_model_default_params(), (ctypes.c_int32 * 64)()
place = bytes(parameters.bytes).index(bytes([0, 0, 1]), 64)  # use_mmap is the first one that is true
parameters.bytes[place - place % 8] = 1  # vocab_only
for line in sys.stdin:
    vocab = lib.llama_model_get_vocab(lib.llama_model_load_from_file(line.strip().encode(), parameters))
    ids = []
    for text in json.loads(sys.argv[2]):
        n = lib.llama_tokenize(vocab, text.encode(), len(text), buffer, 64, False, False)
        ids.append(list(buffer[:n]))
    print(json.dumps(ids), flush=True)
"""


def write_vocabulary(path: Path, pre: str) -> None:
    """A GGUF file without tensors: bytes, and every text of two or three characters of ALPHABET."""
    words = gguf.GGUFWriter(path, "gpt2")
    for add in (words.add_context_length, words.add_embedding_length, words.add_feed_forward_length):
        add(8)
    words.add_block_count(1)
    words.add_head_count(1)
    words.add_layer_norm_eps(1e-5)
    tokens = sorted(ByteLevel.alphabet())
    letters = ["".join(ByteLevel(add_prefix_space=False).pre_tokenize_str(c)[0][0]) for c in ALPHABET]
    longer = ["".join(each) for n in (2, 3) for each in product(letters, repeat=n)]
    words.add_tokenizer_model("gpt2")
    words.add_tokenizer_pre(pre)
    words.add_token_list(tokens + longer)
    words.add_token_types([1] * len(tokens + longer))
    words.add_token_merges([f"{text[:-1]} {text[-1]}" for text in longer])
    words.add_bos_token_id(0)
    words.add_eos_token_id(0)
    words.write_header_to_file()
    words.write_kv_data_to_file()
    words.write_tensors_to_file()
    words.close()


@needs_llama_cpp
def test_pre_tokenizers_random_texts_give_llama_cpps_ids(tmp_path: Path) -> None:
    draw = random.Random(5)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randint(1, 12))) for _ in range(150)]
    texts = [text for text in texts if not SPACES_BEFORE_DIGITS.search(text)] + ["1" * n for n in range(1, 9)]
    for name in NAMES:
        write_vocabulary(tmp_path / f"{name}.gguf", name)
    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    library = next(Path(spec.origin).parent.glob("*.so"))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(library), json.dumps(texts)],
        input="".join(f"{tmp_path / name}.gguf\n" for name in NAMES),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode < 0:
        pytest.skip("the package of llama.cpp is not built for this processor")
    for name, line in zip(NAMES, done.stdout.splitlines(), strict=True):
        with GGUFFile.open(tmp_path / f"{name}.gguf") as file:
            ours = tokenizers.from_metadata(file.metadata)
        for text, ids in zip(texts, json.loads(line), strict=True):
            assert ours.encode(text, add_special=False) == ids, (name, text)
