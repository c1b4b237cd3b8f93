"""MTP head: its pages in any batch, its tensors (test_mtp_llama_cpp.py: its drafts)."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.graph.tensor import Tensor
from logitless.models.adapters.full_finetunes import FullFinetunes
from logitless.models.architectures.mtp import Hidden, can_guess, follow, guess
from logitless.models.batch import Batch, Cached, PagedMemory
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.weights.weights import check_weights
from tests.helpers.architecture_specs import PLAIN
from tests.helpers.mtp_specs import MAPPED_NEXTN, NEXTN
from tests.helpers.reference_model import Array, Spec, write
from tests.models.architectures.test_registry import compute

N_TOKENS, N_MORE = 40, 3
TABLES = np.array([[3, 1, 6], [5, 2, 4]], np.int32)
N_ROWS, N_STATES = 300, 5
Tokens = tuple[int, Array, range]  # a sequence, all of its tokens, and which of them


class Guessing:
    """A model and the block behind it on the CPU, with two sequences in its pages; `n_window`: so
    many are of layers with a window."""

    def __init__(self, path: Path, types: tuple[str, str] = ("f32", "f32"), n_window: int = 0) -> None:
        self.session, self.gguf = Session([CPUBackend(1)]), GGUFFile.open(path)
        self.h = hparams_of(self.gguf)
        self.model = define_model(self.session, self.gguf, self.h, 64, mtp=True)
        self.memory = PagedMemory.define(self.session, self.h, 7, TABLES.shape, *types, N_STATES, n_window, mtp=True)
        self.rows = Hidden.define(self.session, self.h.hidden_width, N_ROWS)
        for i in range(len(self.memory.pools)):
            self.session.write(("tables", "tables.window")[i], TABLES - i)
        self.said: dict[tuple[int, int], int] = {}  # of a sequence and a position: the row
        self.n_steps = [0, 0]  # of each sequence
        self._places = iter(1 + np.random.default_rng(11).permutation(N_ROWS - 1))  # the first row stays zero

    def step(self, *parts: Tokens) -> Array:
        """Logits of all tokens; what the block keeps of them is kept."""
        begin, end = [], []
        for slot, _, which in parts:
            n, states = self.n_steps[slot], (1 + 2 * slot, 2 + 2 * slot)
            begin += [states[(n - 1) % 2] if n else 0] + [-1] * (len(which) - 1)
            end += [-1] * (len(which) - 1) + [states[n % 2]]
            self.n_steps[slot] += 1
        to = self._to(parts)
        feeds = self._feeds(parts) | to
        if self.h.recurrent:
            feeds |= {"begin": np.array(begin, np.int32), "end": np.array(end, np.int32)}

        def nodes() -> list[Tensor]:
            n = len(feeds["tokens"])
            batch, hidden = Batch.feeds(n), Hidden.feeds(self.rows, n)
            inputs: list[Tensor] | None = [] if self.h.architecture.mtp.as_layer else None
            x = self.model.hidden(batch, Cached(self.memory, batch), inputs)
            state = inputs[-1] if inputs else x
            return [*follow(self.model, batch, self.memory, hidden, state), self.model.head(x)]

        return self._run(nodes, feeds)[-1]

    def guess(self, *parts: Tokens) -> Array:
        """Logits of the tokens after these. What the block says of them is there for guesses that
        follow."""
        feeds = self._feeds(parts) | self._to(parts)
        if self.memory.indexed:  # two rows behind those of the model
            ((slot, _, (i,)),) = parts
            own, n = [N_STATES + 2 * slot + k % 2 for k in range(2)], i - N_TOKENS
            begin = own[(n - 1) % 2] if n > 0 else 1 + 2 * slot + (self.n_steps[slot] - 1) % 2
            feeds |= {"begin": np.array([begin], np.int32), "end": np.array(own[n % 2 : n % 2 + 1], np.int32)}

        def nodes() -> list[Tensor]:
            n = len(feeds["tokens"])
            return list(guess(self.model, Batch.feeds(n), self.memory, Hidden.feeds(self.rows, n)))

        return self._run(nodes, feeds)[0]

    def kept(self, slot: int) -> list[Array]:
        """The bytes of the block's pages of a sequence."""
        pages = []
        for i, pool in enumerate(self.memory.pools):
            for t in pool.layers.get(self.h.n_layer, ()):
                raw = self.session.read_bytes(t.name, 0, t.nbytes).reshape(t.shape[0], -1)
                pages.append(raw[TABLES[slot] - i])
        return pages

    def _to(self, parts: Sequence[Tokens]) -> dict[str, Array]:
        """Rows that nobody has used."""
        places = {(slot, i): int(next(self._places)) for slot, _, which in parts for i in which}
        self.said |= places
        return {"hidden.to": np.array(list(places.values()), np.int32)}

    def _feeds(self, parts: Sequence[Tokens]) -> dict[str, Array]:
        slot = np.array([slot for slot, _, which in parts for _ in which], np.int32)
        pos = np.array([i for _, _, which in parts for i in which], np.int32)
        tokens = np.array([ids[i] for _, ids, which in parts for i in which], np.int32)
        before = [self.said.get((s, p - 1), 0) for s, p in zip(slot.tolist(), pos.tolist(), strict=True)]
        feeds = {"tokens": tokens, "pos": pos, "slot": slot, "slot_mapping": TABLES[slot, pos // 16] * 16 + pos % 16}
        if self.memory.window is not None:
            feeds["window_slot_mapping"] = feeds["slot_mapping"] - 16
        return feeds | {"hidden.before": np.array(before, np.int32)}

    def _run(self, nodes: Any, feeds: dict[str, Array]) -> list[Array]:
        return [value.copy() for value in self.session.plan(nodes).run(feeds)]

    def close(self) -> None:
        self.session.close()
        self.gguf.close()


def tokens(s: Spec, seed: int = 3) -> Array:
    return np.random.default_rng(seed).integers(0, s.n_vocab, N_TOKENS + N_MORE)


OF_LAYERS = ["qwen35", "deepseek2", "deepseek2 together", "cohere2moe", "nemotron_h_moe"]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *itertools.product(("f32", "q8_0"), OF_LAYERS),
        *itertools.product(("f32",), ("glm5-next", "qwen4exp", "deepseek4")),
    ],
)
def test_pages_of_mtp_block_have_the_same_bits_in_any_batch(tmp_path: Path, name: str, dtype: str) -> None:
    """However a prompt is cut, whoever is in the batch, whatever was guessed meanwhile, whether
    layers with a window have pages of their own."""
    s = replace((NEXTN | MAPPED_NEXTN)[name], dtype=dtype, types={"ffn_gate_inp": "f32"})
    write(path := tmp_path / "m.gguf", s)
    ids, others, found = tokens(s), tokens(s, seed=5), []
    for i, cut in enumerate(((40,), (1,) * 40, (7, 20, 13), (33, 7), (16, 16, 8))):
        n_window = 6 if i == 4 and name in ("cohere2moe", "deepseek4") else 0
        run, start = Guessing(path, ("f16", "f16"), n_window=n_window), 0
        for n in cut:
            part, beside = (0, ids, range(start, start + n)), (1, others, range(start // 2, (start + n) // 2))
            run.step(*([part], [part, beside], [beside, part])[i % 3 if beside[2] else 0])
            start += n
            if i == 2 and start < N_TOKENS:  # in the cells of the next step
                run.guess((0, others, range(start, start + 1)))
                run.guess((0, others, range(start + 1, start + 2)))
        found.append(run.kept(0))
        run.close()
    for pages in found:
        for page, first in zip(pages, found[0], strict=True):
            assert page.any()
            np.testing.assert_array_equal(page, first)


@pytest.mark.parametrize("name", ["glm4moe", "glm5-next"])
def test_the_first_guess_keeps_what_the_next_step_does(tmp_path: Path, name: str) -> None:
    write(path := tmp_path / "m.gguf", s := (NEXTN | MAPPED_NEXTN)[name])
    ids, kept = tokens(s), []
    for guesses in (True, False):
        run = Guessing(path, ("f16", "f16"))
        run.step((0, ids, range(20)))
        (run.guess if guesses else run.step)((0, ids, range(20, 21)))
        kept.append(run.kept(0))
        run.close()
    for of_guess, of_step in zip(*kept, strict=True):
        np.testing.assert_array_equal(of_guess, of_step)


def test_a_guess_has_the_attention_temperature_of_its_position(tmp_path: Path) -> None:
    """As if the scale of scores were so much greater."""
    keys = {"attention.temperature_scale": 0.7, "attention.temperature_length": 4}
    write(path := tmp_path / "m.gguf", replace(s := NEXTN["deepseek2"], keys=s.keys | keys))
    ids, run, found = tokens(s), Guessing(path), []
    run.step((0, ids, range(N_TOKENS)))
    warm = run.model
    plain = replace(warm, rotary=replace(warm.rotary, temperature=None))
    for factor in (1, 1 + 0.7 * np.log(N_TOKENS // 4 + 1)):
        h = replace(run.h, attention_scale=run.h.attention_scale * factor)
        run.model = replace(plain, hparams=h)
        found.append(run.guess((0, ids, range(N_TOKENS, N_TOKENS + 1))))
    run.model = warm
    got = run.guess((0, ids, range(N_TOKENS, N_TOKENS + 1)))
    np.testing.assert_allclose(got, found[1], rtol=1e-4, atol=1e-5)
    assert np.abs(got - found[0]).max() > 1e-2
    run.close()


def says_what_layers_say(path: Path, s: Spec) -> None:
    """Logits are those of a file that has the layers alone."""
    keys = {name: value[: s.n_layer] if isinstance(value, list) else value for name, value in s.keys.items()}
    keys |= {"block_count": s.n_layer, "nextn_predict_layers": None}
    write(alone := path.with_name("alone.gguf"), replace(s, n_mtp=0, keys=keys))
    ids = tokens(s)[:N_TOKENS]
    np.testing.assert_array_equal(compute(path, s, ids), compute(alone, s, ids))


GONE = object()


def changed(source: Path, target: Path, tensors: dict[str, Any]) -> Path:
    """The file with other tensors; GONE: without one."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for f in reader.fields.values():
        if not f.name.startswith(("GGUF.", "general.")):
            writer.add_key_value(f.name, f.contents(), f.types[0], f.types[1] if len(f.types) > 1 else None)
    for t in reader.tensors:
        values = tensors.get(t.name, t.data)
        if values is not GONE:
            writer.add_tensor(t.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *(("qwen35moe", tensor) for tensor in ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "attn_norm", "attn_q")),
        *(("qwen35moe", tensor) for tensor in ("attn_k_norm", "post_attention_norm", "ffn_gate_inp", "ffn_up_shexp")),
        *(("nemotron_h_moe", tensor) for tensor in ("nextn.shared_head_norm", "post_attention_norm", "ffn_down_exps")),
        *(("deepseek2", tensor) for tensor in ("attn_kv_a_norm", "attn_k_b", "ffn_norm")),
        ("cohere2moe", "attn_output"),
    ],
)
def test_a_block_that_lacks_a_tensor_is_refused(tmp_path: Path, name: str, tensor: str) -> None:
    """Where it is wanted; and one whose shape is wrong."""
    s = NEXTN[name]
    t, whole = write(path := tmp_path / "m.gguf", s), f"blk.{s.n_layer}.{tensor}.weight"
    wrong = np.zeros((*t[whole].shape[:-1], 48), np.float32)
    for values, said in ((GONE, "is missing"), (wrong, f"has shape {wrong.shape}, expected")):
        with GGUFFile.open(changed(path, tmp_path / "other.gguf", {whole: values})) as gguf:
            h = hparams_of(gguf)
            assert can_guess(gguf, h) == (values is not GONE or tensor != "nextn.eh_proj")
            with pytest.raises(ModelFileError, match=re.escape(f"other.gguf: tensor '{whole}' {said}")):
                check_weights(gguf, h, mtp=True)
            check_weights(gguf, h)


@pytest.mark.parametrize("name", ["qwen35", "glm4moe, two blocks", "nemotron_h_moe", "cohere2moe"])
def test_nothing_of_a_block_is_loaded_where_it_is_not_wanted(tmp_path: Path, name: str) -> None:
    """Of several the first is. What the layers say is the same."""
    s = NEXTN[name]
    write(path := tmp_path / "m.gguf", s)
    block = f"blk.{s.n_layer}."
    weights, own, pages = {}, {}, {}
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        assert (h.n_layer, h.n_mtp) == (s.n_layer, s.n_mtp)
        assert can_guess(gguf, h)
        for mtp in (False, True):
            session = Session([CPUBackend(1)])
            model = define_model(session, gguf, h, 64, mtp=mtp)
            weights[mtp] = model.weights.tensors.keys()
            own[mtp] = model.mtp.tensors.keys() if model.mtp is not None else set()
            memory = PagedMemory.define(session, h, 5, (1, 4), "f16", "f16", n_states=3, mtp=mtp)
            pages[mtp] = memory.full.layers.keys()
            for state in (f"{block}nextn.eh_proj.weight", f"k.{h.n_layer}"):
                with contextlib.nullcontext() if mtp else pytest.raises(KeyError, match="no variable is named"):
                    session.read(state)
            session.close()
    assert pages[True] - pages[False] == {s.n_layer}
    assert not pages[False] - pages[True]
    assert weights[False] == weights[True], "what is trained, and what adapters are made for"
    assert not [name for name in weights[True] if name.startswith(block)]
    assert own[False] == set()
    assert {f"{block}nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")} < own[True]
    says_what_layers_say(path, s)


def test_a_file_may_say_that_it_has_a_block_and_not_have_it(tmp_path: Path) -> None:
    """A block may be in a file of its own."""
    s = NEXTN["qwen35"]
    s = replace(s, n_mtp=0, keys=s.keys | {"nextn_predict_layers": 1, "block_count": s.n_layer + 1})
    write(path := tmp_path / "m.gguf", s)
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        assert (h.n_layer, h.n_mtp) == (4, 1)
        assert not can_guess(gguf, h)
        with pytest.raises(ModelFileError, match=r"m.gguf: tensor 'blk.4.attn_norm.weight' is missing"):
            check_weights(gguf, h, mtp=True)
    says_what_layers_say(path, s)


@pytest.mark.parametrize("name", ["bailingmoe2", "exaone-moe"])
def test_blocks_of_other_architectures_are_left_alone(tmp_path: Path, name: str) -> None:
    s = replace(PLAIN[name], n_mtp=1)
    write(path := tmp_path / "m.gguf", s)
    with GGUFFile.open(path) as gguf:
        assert not can_guess(gguf, hparams_of(gguf))
    says_what_layers_say(path, s)


def test_a_finetune_guesses_by_its_own_block(tmp_path: Path) -> None:
    """Where another model's graph has its weights: models/adapters/full_finetunes.py."""
    s = NEXTN["qwen35"]
    t, name = write(path := tmp_path / "m.gguf", s), "blk.4.nextn.eh_proj.weight"
    other = changed(path, tmp_path / "other.gguf", {name: 2 * t[name].astype(np.float32)})
    run = Guessing(path)
    sets = FullFinetunes(run.session, run.model, run.gguf)
    block, base = sets.model(sets.put(other)).mtp, run.model.mtp
    assert block is not None
    assert base is not None
    tensors = block.tensors
    differ = [key for key, tensor in tensors.items() if tensor is not base.tensors[key]]
    assert differ == [name]
    np.testing.assert_array_equal(run.session.read(tensors[name].name), 2 * run.session.read(name))
    sets.close()
    run.close()
