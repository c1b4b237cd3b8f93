"""llama.cpp as the oracle of adapters, architectures and weight types: same tokens, log-probabilities.

It loads files that are written here, and its converter's files are loaded here. It runs in a
process of its own, which it may end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from logitless.backends.cpu.backend import CPUBackend
from logitless.engine.batch import BLOCK_SIZE, UBatch
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.graph.execution.session import Session
from logitless.models.adapters.lora import Adapter, Pair, fused, read_adapter, write_adapter
from logitless.models.adapters.low_rank import EMBEDDING, NORMS
from logitless.models.adapters.merge import merge
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.synthetic.model import synthesize
from logitless.models.tokenizer import from_metadata
from logitless.training.adapters.lora import lora
from logitless.training.adapters.options import LoraOptions
from tests.helpers import bert_model
from tests.helpers.architecture_specs import COHERE_MOE, ENCODERS, MAPPED, PLAIN
from tests.helpers.mla_specs import DEEPSEEK
from tests.helpers.random_blocks import RANDOM_TYPES, random_blocks
from tests.helpers.reference_model import Spec, write
from tests.helpers.unigram import TOKENS, add_unigrams
from tests.models.adapters.test_lora import random_adapter
from tests.models.architectures.test_encoder import GEMMA, MODERN, opened
from tests.models.architectures.test_gemma3n import GEMMA3N, GEMMA4, SMALL
from tests.models.gguf.test_older_layouts import written_in_2025

pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
TEXT = [1, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315]
FIRST = 4  # of the prefixes that are asked
OPEN = """
import json, sys
import xllamacpp
def opened(path, n_ctx, **more):
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = path, n_ctx, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.warmup, params.fit_params, params.verbosity, params.cpuparams.n_threads = False, False, -1, 1
    for name, value in more.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)
"""
LLAMA_CPP = """
for path, adapters, mixes, prompts in json.load(sys.stdin):
    loras = [xllamacpp.CommonAdapterLoraInfo(file, 1.0) for file in adapters]
    single = {"n_ubatch": 1} if "cogvlm" in path else {}  # its logits are those of a step's first token
    server = opened(path, 256, lora_adapters=loras, **single)
    for mix in mixes:
        lora, found = [{"id": i, "scale": scale} for i, scale in enumerate(mix)], []
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 4, "lora": lora}
            told = server.handle_completions({**body, "ignore_eos": True})["choices"][0]["logprobs"]
            found.append([(t["id"], t["logprob"]) for t in told["content"][0]["top_logprobs"]] if told else [])
        print(json.dumps(found))
"""
CHUNKS = """
path, n_ctx, prompts = json.load(sys.stdin)
exact = {"flash_attn_type": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED} if "exact" in path else {}
server = opened(path, n_ctx, **exact)
for prompt in prompts:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 8, "ignore_eos": True}
    told = server.handle_completions(body)["choices"][0]["logprobs"]
    print(json.dumps([(t["id"], t["logprob"]) for t in told["content"][0]["top_logprobs"]] if told else []))
"""
VECTORS = """
for path, texts in json.load(sys.stdin):
    server = opened(path, 64, n_batch=64, n_ubatch=64, embedding=True)
    print(json.dumps([server.handle_embeddings({"input": text})["data"][0]["embedding"] for text in texts]))
"""
RANKS = """
rank = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
for path, body in json.load(sys.stdin):
    server = opened(path, 128, n_batch=128, n_ubatch=128, embedding=True, pooling_type=rank)
    found = server.handle_rerank(body)["results"]
    print(json.dumps([item["relevance_score"] for item in sorted(found, key=lambda item: item["index"])]))
"""
Likeliest = list[list[tuple[int, float]]]  # ids and log-probabilities after each prefix; none where a byte is no text


@dataclass(frozen=True)
class Case:
    model: Path
    adapters: list[Path]
    mixes: list[list[float]]  # a scale for each adapter


def theirs(cases: list[Case]) -> list[list[Likeliest]]:
    prompts = [TEXT[: i + 1] for i in range(FIRST, len(TEXT))]
    given = json.dumps([(str(c.model), [str(a) for a in c.adapters], c.mixes, prompts) for c in cases])
    lines = map(json.loads, answers(LLAMA_CPP, given))
    return [[next(lines) for _ in case.mixes] for case in cases]


def answers(code: str, given: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", OPEN + code], input=given, capture_output=True, text=True, timeout=300)
    if done.returncode == -signal.SIGILL:
        pytest.skip("the package of llama.cpp is not built for this processor")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def ours(case: Case, text: list[int] = TEXT) -> list[np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
    """Log-probabilities of all tokens after each prefix of TEXT, for each mixture. `text` begins with it."""
    kind = "f16" if "wide" in case.model.name else "f32"  # heads of 512 that test_ops has compiled
    options = RunnerOptions(n_ctx=256, n_slots=1, n_ubatch=128, type_k=kind, type_v=kind)
    engine = ModelRunner(case.model, options)
    handles = [engine.adapters.put(read_adapter(a, engine.gguf, hparams_of(engine.gguf))) for a in case.adapters]
    n, n_vocab, got = len(text), hparams_of(engine.gguf).n_vocab, []
    for mix in case.mixes:
        rows = list(range(n))
        batch = UBatch(text, rows, [0] * n, rows, rows, [None] * n, [0] * n, n_top=1 + n_vocab)
        batch.tables[0] = [*range(n // BLOCK_SIZE + 1)]
        batch.begin, batch.end = [0] + [-1] * (n - 1), [-1] * n
        batch.mixes[0] = tuple((handle, scale) for handle, scale in zip(handles, mix, strict=True) if scale)
        result = engine.step(batch)
        assert result.top_ids is not None
        assert result.logprobs is not None
        values = np.full((n, n_vocab), -np.inf)
        for row, ids, of_ids in zip(values, result.top_ids, result.logprobs[:, 1:], strict=True):
            row[ids[ids >= 0]] = of_ids[ids >= 0]
        got.append(values[FIRST : len(TEXT)])
    engine.close()
    return got


def adapter_for(
    base: GGUFFile, seed: int, names: list[str] | None = None, rank: int = 4, alpha: float = 0.0
) -> Adapter:
    """Pairs of all matrices of the blocks, which llama.cpp uses, and of `names`."""
    found = random_adapter(base, seed, rank, alpha, size=0.2)
    products = (name for name in found.pairs if not NORMS.fullmatch(name) and not name.endswith("conv1d.weight"))
    pairs = {name: found.pairs[name] for name in products}
    rng = np.random.default_rng(seed)
    for name in names or []:
        n_out, n_in = base.tensors[name].shape
        shapes = ((n_out, 3), (n_in, 3)) if name == EMBEDDING else ((3, n_in), (n_out, 3))
        pairs[name] = Pair(*(rng.normal(size=s).astype(np.float32) * np.float32(0.2) for s in shapes))
    return Adapter(pairs, alpha)


def converted(path: Path, adapter: Adapter, base: GGUFFile) -> None:
    """As convert_lora_to_gguf.py writes it: f16, and beside the pairs a norm as a whole."""
    h = hparams_of(base)
    writer = GGUFWriter(path, h.arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", adapter.alpha)
    for name, pair in fused(adapter, base, h).items():
        writer.add_tensor(f"{name}.lora_a", pair.a.astype(np.float16))
        writer.add_tensor(f"{name}.lora_b", pair.b.astype(np.float16))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(h.n_embd, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "names",
    [
        ("stories260K", "arch-phi3-F32", "stories260K-conv-Q8_0"),
        pytest.param(("gemma4", "falcon-h1"), marks=pytest.mark.long),
    ],
    ids=["llama", "others"],
)
def test_adapters_mean_the_same_to_llama_cpp(shared_data: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    """Several ranks and alphas, the embedding and the output, both writers, merged; fused matrices,
    quantised ones."""
    cases: list[Case] = []
    for name in names:
        path = shared_data / "models" / f"{name}.gguf"
        if name in (made := {"gemma4": SMALL, "falcon-h1": PLAIN["falcon-h1"]}):
            write(path := tmp_path / f"{name}.gguf", replace(made[name], n_vocab=2048, vocabulary=True))
        written, by_converter, merged = (tmp_path / f"{name}.{which}" for which in ("written", "converted", "merged"))
        with GGUFFile.open(path) as base:
            h = hparams_of(base)
            more = [EMBEDDING, "output.weight"] if name == "stories260K" else []
            write_adapter(written, adapter_for(base, 1, more), base, h)  # ranks 4 and 3 with an alpha of 4
            converted(by_converter, adapter_for(base, 2, rank=8, alpha=12.0), base)
            merge(merged, base, h, [(read_adapter(written, base, h), 0.5)])
        mixes = [[1.0, 0.0], [0.5, 0.0], [0.0, 1.0], [1.0, -0.5], [0.0, 0.0]]
        cases += [Case(path, [written, by_converter], mixes), Case(merged, [], [[]])]
    for case, of_mixes in zip(cases, theirs(cases), strict=True):
        rounding = 0.12 if "Q8_0" in case.model.name else 0.03  # of activations (0.07, 0.01), without adapters, too
        got = ours(case)
        for values, likeliest in zip(got, of_mixes, strict=True):
            pairs = [(row[id], value) for row, found in zip(values, likeliest, strict=True) for id, value in found]
            assert len(pairs) >= 4 * len(values) / 2
            assert _rms(np.subtract(*np.transpose(pairs))) < rounding
        for i, values in enumerate(got):  # and the mixtures differ by more than that
            assert all(_rms(values - other) > 2 * rounding for other in got[:i])


def test_adapters_of_experts_mean_the_same_to_llama_cpp(tmp_path: Path) -> None:
    write(path := tmp_path / "mixtral-F32.gguf", replace(PLAIN["mixtral"], n_vocab=2048, vocabulary=True))
    rng = np.random.default_rng(0)
    with GGUFFile.open(path) as gguf, Session([CPUBackend(1)]) as session:
        h = hparams_of(gguf)
        options = LoraOptions(4, 8.0, targets=("experts",))
        trainable = lora(session, define_model(session, gguf, h, 64), options, gguf=gguf)
        trainable.write({name: v + 0.2 * rng.normal(size=v.shape) for name, v in trainable.read().items()})
        write_adapter(tmp_path / "a.gguf", trainable.adapter(), gguf, h)
    case = Case(path, [tmp_path / "a.gguf"], [[1.0], [0.0]])
    (of_mixes,), got = theirs([case]), ours(case)
    for values, likeliest in zip(got, of_mixes, strict=True):
        pairs = [(row[id], value) for row, found in zip(values, likeliest, strict=True) for id, value in found]
        assert len(pairs) >= 4 * len(values) / 2
        assert _rms(np.subtract(*np.transpose(pairs))) < 0.01
    assert _rms(got[0] - got[1]) > 1


def _rms(x: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(np.sqrt(np.mean(x * x)))


PATTERN = {"attention.sliding_window": 4, "attention.sliding_window_pattern": 2}
TEMPERATURE = {"attention.temperature_length": 3, "rope.scaling.yarn_log_multiplier": 0.1}
WINDOW = {"attention.sliding_window": 4}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 4,
    "rope.scaling.yarn_log_multiplier": 0.5,
    "attention.temperature_scale": 0.25,
}
SCALES = {"embedding_scale": 6.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 3.0}
REFUSED = (
    "phi3 apart",
    "phi3 partial rope",
    "granite without scales",
    "plm",
    "command-r plus",  # which has its norms from 64 layers on
    "phimoe",  # whose norms and weights of experts are others there, unlike its authors'
    "grovemoe",  # whose adjugate experts read the output of the others there, unlike its authors'
)  # by llama.cpp, which has no tensors, no logits or (plm) an assertion that fails
UNBLOCKED = ("gemma3n", "deepseek2 of odd heads")  # rows that are not whole blocks
DEEP = 26  # layers, whose rounding adds up: others of their architectures have blocks
SPECS = {name: spec for name, spec in PLAIN.items() if name.startswith(spec.arch) and name not in REFUSED} | {
    "granite": Spec("granite", keys=SCALES),
    "minicpm": Spec("minicpm", keys=SCALES),
    "granitemoe": replace(PLAIN["granitemoe"], keys=SCALES),
    "ernie4_5": Spec("ernie4_5", untied=True),
    "granitemoe shared": replace(PLAIN["granitemoe shared"], keys=SCALES | {"expert_shared_feed_forward_length": 64}),
    **{  # whose chunks have 8192 positions
        name: replace(spec, keys={"interleave_moe_layer_step": spec.keys["interleave_moe_layer_step"]})
        for name, spec in PLAIN.items()
        if spec.arch == "llama4"
    },
    "llama, six layers": Spec(n_layer=6, untied=True),
    "llama, linear": Spec(keys=LINEAR),
    "llama, yarn": Spec(keys=YARN | {"rope.scaling.yarn_log_multiplier": None, "attention.temperature_scale": None}),
    "llama, factors": Spec(factors={"rope_freqs": 8.0}),
    "mixtral": PLAIN["mixtral"],
    "mixtral, experts of 172": Spec(n_expert=4, n_expert_used=2, n_ff=172, types={"ffn_down_exps": "f16"}),
    "mixtral, experts of 7": Spec(n_embd=72, head_dim=16, n_expert=4, n_expert_used=2, n_ff=7, untied=True),
    "command-r, per head": replace(PLAIN["command-r plus"], n_layer=64, n_ff=32),
    "llama, scales of matrices": Spec(traits=("scales",)),
    "mixtral, scales of experts": Spec(n_expert=4, n_expert_used=2, traits=("scales",)),
    "mistral3, yarn": Spec("mistral3", keys=YARN),
    "deepseek2, yarn": replace(DEEPSEEK, keys=DEEPSEEK.keys | YARN | {"attention.temperature_scale": None}),
    "mistral4": replace(PLAIN["mistral4"], keys=DEEPSEEK.keys | YARN | TEMPERATURE),
    "exaone-moe": replace(PLAIN["exaone-moe"], n_layer=4, keys=PLAIN["exaone-moe"].keys | WINDOW),
    "afmoe": replace(PLAIN["afmoe"], n_layer=4, keys=PLAIN["afmoe"].keys | WINDOW),
    "mellum": replace(PLAIN["mellum"], n_layer=4, keys=WINDOW | LINEAR),
    "cogvlm": PLAIN["cogvlm"],
    "hunyuan_vl": Spec("hunyuan_vl", keys={"rope.scaling.alpha": 40.0}),
    "minicpm without scales": Spec("minicpm"),
    "cohere2": Spec("cohere2", n_layer=4, keys={"attention.sliding_window": 4, "logit_scale": 0.25}),
    "cohere2moe": COHERE_MOE,
    "olmo2, windows": Spec("olmo2", n_layer=5, untied=True, keys={"attention.sliding_window": 4}),
    "olmo2, more of them": Spec("olmo2", n_layer=4, untied=True, keys=PATTERN),
    **GEMMA4,
    **GEMMA3N,
    "exaone4, windows": Spec("exaone4", n_layer=64, n_ff=32, untied=True, keys={"attention.sliding_window": 4}),
    **MAPPED,
}


QUANTISED = (  # one of each kind of layer; the others' Q8_0 is compared with --long
    *("llama", "gpt-oss", "llama4", "granitemoe shared", "qwen3vlmoe", "glm4", "cogvlm", "falcon", "gemma", "stablelm"),
    *("phi2", "gpt2", "olmo2", "qwen2moe", "bailingmoe2", "qwen35moe", "qwen3next", "lfm2moe", "nemotron_h_moe"),
    *("granitehybrid of experts", "falcon-h1", "mamba2", "deepseek2", "deepseek2 in groups", "mistral4", "minicpm3"),
    *("hunyuan-moe", "apertus", "mixtral", "cohere2moe", "gemma4 experts", "gemma3n, all keep keys"),
)
OTHER_TYPES = ("q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl", "mxfp4", "nvfp4", "q1_0")


# one of each kind of code and scale; the others are compared with --long, and with the dequantiser in test_ops
UNLIKE_TYPES = ("q2_k", "q3_k", "iq1_m", "iq2_xxs", "iq3_s", "tq1_0", "q2_0", "q4_k", "q5_1", "iq4_nl", "nvfp4", "q1_0")


@pytest.mark.timeout(1200)
def test_architectures_mean_the_same_to_llama_cpp(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert set(QUANTISED) <= set(SPECS)
    cases = []
    for name, spec in SPECS.items():
        blocks = spec.n_embd % 32 == 0 and name not in (*UNBLOCKED, *MAPPED) and spec.n_layer < DEEP
        blocks = blocks and (name in QUANTISED or request.config.getoption("--long"))
        for dtype in ("F32", "Q8_0") if blocks else ("F32",):
            path = tmp_path / f"{name}-{dtype}.gguf"
            write(path, replace(spec, n_vocab=2048, dtype=dtype.lower(), vocabulary=True))
            cases.append(Case(path, [], [[]]))
            if name == "qwen3next":
                cases.append(Case(written_in_2025(path, tmp_path / f"{name} of 2025-{dtype}.gguf"), [], [[]]))
    unlike = {}
    for case, (likeliest,) in zip(cases, theirs(cases), strict=True):
        (values,), name = ours(case), case.model.stem
        pairs = [(row[id], value) for row, found in zip(values, likeliest, strict=True) for id, value in found]
        assert len(pairs) >= 4 * len(values) / 2
        away = np.abs(np.subtract(*np.transpose(pairs))) / np.std(values[np.isfinite(values)])
        if "F32" in name:  # in many layers f16 caches and gates that open add up
            error, bound = _rms(away), 0.02 if name == "gemma3n-F32" else 0.005 if "deepseek2 lite" in name else 0.002
        else:  # activations are rounded, so that a row may choose another expert
            error, bound = float(np.median(away)), 0.05
        if not error < bound:
            unlike[name] = error
    assert unlike == {}


def test_choices_of_cells_are_llama_cpps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In texts of 100 tokens and more. Where two scores are all but equal, another cell may be chosen."""
    pools = {"minimax-m3": 3, "glm5-next": 4, "qwen4exp": 4, "hy_v4 with an indexer": 1, "deepseek32": 1}
    sizes = {"minimax-m3": {"attention.indexer.block_size": 5, "attention.indexer.local_blocks": 2}}
    sizes |= {"glm5-next": {"attention.indexer.kpool": 4}, "qwen4exp": {"attention.compress_ratios": [0, 4, 0, 4]}}
    text = [1, *np.random.default_rng(1).integers(261, 512, 109).tolist()]
    monkeypatch.setattr(sys.modules[__name__], "TEXT", text)
    monkeypatch.setattr(sys.modules[__name__], "FIRST", 100)
    cases, whole = [], []
    for name, pool in pools.items():
        path, spec = tmp_path / f"{name}.gguf", replace(MAPPED[name], n_ctx_train=256, n_vocab=2048, vocabulary=True)
        keys = spec.keys | sizes.get(name, {}) | {"attention.indexer.top_k": 4 * pool if name != "minimax-m3" else 4}
        write(path, replace(spec, keys=keys))
        cases.append(Case(path, [], [[]]))
        write(path := tmp_path / f"{name} of all.gguf", replace(spec, keys=keys | {"attention.indexer.top_k": 240}))
        whole.append(Case(path, [], [[]]))
    for case, other, (likeliest,) in zip(cases, whole, theirs(cases), strict=True):
        (values,), (of_all,) = ours(case, text), ours(other, text)
        pairs = [(row[id], value) for row, found in zip(values, likeliest, strict=True) for id, value in found]
        assert np.median(np.abs(np.subtract(*np.transpose(pairs)))) < 0.01, case.model.name
        assert _rms((values - of_all)[np.isfinite(values)]) > 0.05, case.model.name


def in_steps(
    path: Path, ids: list[int], lengths: Collection[int], options: RunnerOptions
) -> dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Log-probabilities (512,) behind the first so many ids, which are computed in steps of `n_ubatch` tokens."""
    engine, rows, step = ModelRunner(path, options), {}, options.n_ubatch
    for start in range(0, len(ids), step):
        pos = list(range(start, min(start + step, len(ids))))
        n = len(pos)
        batch = UBatch(ids[start : start + n], pos, [0] * n, pos, list(range(n)), [None] * n, [0] * n, n_top=513)
        batch.tables[0] = list(range(engine.n_ctx // 16))
        result = engine.step(batch)
        assert result.top_ids is not None
        assert result.logprobs is not None
        for i in (i for i in range(n) if pos[i] + 1 in lengths):
            rows[pos[i] + 1] = np.empty(512)
            rows[pos[i] + 1][result.top_ids[i]] = result.logprobs[i, 1:]
    engine.close()
    return rows


def test_rows_of_blocks_are_llama_cpps(tmp_path: Path) -> None:
    """DeepSeek V4 with two chosen blocks of 4 tokens, of up to 65, and with blocks of 128."""
    lengths = (7, 40, 127, 128, 129, 255, 256, 260)
    ids = [1, *np.random.default_rng(1).integers(261, 512, max(lengths) - 1).tolist()]
    yarn = YARN | {"attention.temperature_scale": None}
    spec = replace(SPECS["deepseek4"], n_vocab=512, n_ctx_train=512, keys=SPECS["deepseek4"].keys | yarn)
    write(path := tmp_path / "exact.gguf", replace(spec, vocabulary=True))
    rows = in_steps(path, ids, lengths, RunnerOptions(512, 1, 100, type_k="f32", type_v="f32"))
    lines = answers(CHUNKS, json.dumps([str(path), 512, [ids[:n] for n in lengths]]))
    pairs = [(rows[n][id], value) for n, line in zip(lengths, lines, strict=True) for id, value in json.loads(line)]
    assert len(pairs) >= 4 * len(lengths)
    assert np.abs(np.subtract(*np.transpose(pairs))).max() < 5e-4


@pytest.mark.long
def test_chunks_of_8192_positions_are_llama_cpps(tmp_path: Path) -> None:
    """Log-probabilities before and behind the end of the first chunk; those of full attention differ."""
    n_ctx, lengths = 8448, (8190, 8192, 8193, 8194, 8196, 8206)
    spec = replace(SPECS["llama4"], n_embd=32, n_layer=4, n_head=2, n_head_kv=1, n_expert=2, n_expert_used=2)
    ids = [1, *np.random.default_rng(1).integers(261, 512, max(lengths) - 1).tolist()]
    logprobs = []
    for size in (8192, 2 * n_ctx):
        keys = spec.keys | {"attention.chunk_size": size}
        write(
            path := tmp_path / f"{size}.gguf", replace(spec, n_vocab=512, n_ctx_train=n_ctx, vocabulary=True, keys=keys)
        )
        logprobs.append(in_steps(path, ids, lengths, RunnerOptions(n_ctx=n_ctx, n_slots=1, n_ubatch=512)))
    lines = answers(CHUNKS, json.dumps([str(tmp_path / "8192.gguf"), n_ctx, [ids[:n] for n in lengths]]))
    for n, line in zip(lengths, lines, strict=True):
        chunked, full = (_rms(np.array([rows[n][id] - value for id, value in json.loads(line)])) for rows in logprobs)
        assert chunked < 0.3, n
        assert n <= 8192 or full > 10 * chunked, n


def test_vectors_are_llama_cpps(tmp_path: Path) -> None:
    """BERT with pieces of words and with unigrams (bge-m3), nomic-bert, EmbeddingGemma; vectors
    have a length of 1."""
    xlmr = bert_model.tensors(head=False)
    xlmr["token_embd.weight"] = xlmr["token_embd.weight"][: len(TOKENS)]
    texts = ["the cat sat on the mat", "a dog ran, and the moon", "ab the\u00a0\ufb01ne  日本", "sun", "a cat and " * 7]
    paths = [
        bert_model.write(tmp_path / "bert.gguf", bert_model.tensors(head=False), pooling=1),
        bert_model.write(tmp_path / "nomic.gguf", bert_model.tensors(head=False, nomic=True), pooling=1),
        bert_model.write(tmp_path / "moe.gguf", bert_model.tensors(head=False, experts=True), pooling=1),
        bert_model.write(tmp_path / "jina.gguf", bert_model.tensors(head=False, jina=True), pooling=1),
        bert_model.write(tmp_path / "xlmr.gguf", xlmr, pooling=2, vocabulary=add_unigrams),
    ]
    write(tmp_path / "gemma.gguf", replace(GEMMA, n_vocab=512, vocabulary=True))
    write(tmp_path / "modern.gguf", replace(MODERN, n_vocab=512, vocabulary=True))
    silu = MODERN.keys | {"hidden_activation": "silu"}  # Granite Embedding R2's
    write(tmp_path / "silu.gguf", replace(MODERN, n_vocab=512, vocabulary=True, keys=silu))
    paths += [tmp_path / f"{name}.gguf" for name in ("gemma", "modern", "silu")]
    for name in ("eurobert", "llama-embed", "llama"):
        spec = Spec(
            name, n_vocab=512, vocabulary=True, n_ctx_train=128, keys={"pooling_type": 1, "attention.causal": False}
        )
        write(tmp_path / f"{name}.gguf", spec)
        paths.append(tmp_path / f"{name}.gguf")
    for name, spec in ENCODERS.items():
        write(tmp_path / f"{name}.gguf", spec)
        paths.append(tmp_path / f"{name}.gguf")
    for path, line in zip(paths, answers(VECTORS, json.dumps([(str(path), texts) for path in paths])), strict=True):
        with GGUFFile.open(path) as gguf:
            tokenizer = from_metadata(gguf.metadata)
        session, embedder = opened(path)
        for text, wanted in zip(texts, json.loads(line), strict=True):
            vector = embedder.embed([tokenizer.encode(text)], embedder.default)[0]
            assert np.abs(vector / np.linalg.norm(vector) - wanted).max() < 1e-3, (path.name, text)
        session.close()


def test_scores_of_pairs_are_llama_cpps(tmp_path: Path) -> None:
    """Qwen3's reranker, whose head says the chances of yes and no and whose file has a template;
    ModernBERT's."""
    labels = {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
    specs = {"qwen3": replace(PLAIN["qwen3"], keys=labels), "modern-bert": MODERN}
    query, documents, asked = "ta ne", ["so ta", "nu mo li", "ta ne ta ne"], []
    for name, spec in specs.items():
        write(path := tmp_path / f"{name}.gguf", replace(spec, n_vocab=2048, vocabulary=True, traits=("ranks",)))
        asked.append((str(path), {"query": query, "documents": documents}))
    for (path, _), line in zip(asked, answers(RANKS, json.dumps(asked)), strict=True):
        with GGUFFile.open(path) as gguf:
            tokenizer, template = from_metadata(gguf.metadata), gguf.metadata.get("tokenizer.chat_template.rerank")
        session, embedder = opened(Path(path))
        for document, wanted in zip(documents, json.loads(line), strict=True):
            if template:
                text = template.replace("{query}", query).replace("{document}", document)
                ids = tokenizer.encode(text, add_special=False)
            else:
                ids = [1, *(id for text in (query, document) for id in tokenizer.encode(text, add_special=False))]
            assert embedder.embed([ids], "rank")[0][0] == pytest.approx(wanted, abs=2e-3), (path, document)
        session.close()


def test_types_mean_the_same_to_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setitem(gguf.GGML_QUANT_SIZES, 42, (64, 18))  # q2_0, which the package gguf does not know
    synthesize(source := tmp_path / "source.gguf", "mini", "F32")
    cases = []
    every = (*RANDOM_TYPES, *OTHER_TYPES, "q2_0")
    assert set(UNLIKE_TYPES) <= set(every)
    for dtype in every if request.config.getoption("--long") else UNLIKE_TYPES:
        reader, rng = GGUFReader(source), np.random.default_rng(4)
        writer = GGUFWriter(path := tmp_path / f"{dtype}.gguf", "llama")
        for f in reader.fields.values():
            if f.name.startswith(("tokenizer.", "llama.")):
                writer.add_key_value(f.name, f.contents(), f.types[0], f.types[1] if len(f.types) > 1 else None)
        for t in reader.tensors:
            if t.name.startswith("blk") and len(t.shape) == 2:
                raw = random_blocks(rng, t.data.shape, dtype, t.data.std())
                writer.add_tensor(t.name, raw, raw_dtype=42 if dtype == "q2_0" else GGMLQuantizationType[dtype.upper()])
            else:
                writer.add_tensor(t.name, t.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        cases.append(Case(path, [], [[]]))
    for case, (likeliest,) in zip(cases, theirs(cases), strict=True):
        (values,) = ours(case, TEXT * 3)  # the kernels of many rows, which test_ops has compiled for every type
        pairs = [(row[id], value) for row, found in zip(values, likeliest, strict=True) for id, value in found]
        assert len(pairs) >= 4 * len(values) / 2
        # activations are rounded: either is some 0.1 from the exact value, but where random bytes
        # make small numbers
        most = 0.02 if case.model.stem in ("q2_k", "tq2_0") else 0.2
        assert _rms(np.subtract(*np.transpose(pairs))) < most, case.model.name
