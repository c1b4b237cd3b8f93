"""Generated parts of the documentation: a hook of mkdocs that fills in references from the code.

A line `<!-- generated: NAME [ARGUMENT] -->` of a page is replaced by the output of the function that `GENERATORS`
has under NAME: the command line's flags, the HTTP endpoints, the hyperparameters, the error lines, the table of
models, the examples that run, the modules of a package, or a file of the repository. Nothing generated is committed, so
nothing can be out of date."""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import griffe

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^<!-- generated: (\w+) ?(\S*) -->$", re.MULTILINE)
FENCE = re.compile(r'^```(\w*)(?: \{\.([\w-]+)\}| title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
REASONS = {  # of a block that does not run (tests/integration/test_snippets.py)
    "config": "a file of another program, only read",
    "needs-cluster": "several machines",
    "needs-gpu": "a device that not every machine has",
    "needs-network": "it downloads or installs",
    "needs-package": "a program that the tests do not install; Python runs where its modules are there",
    "output": "what something prints or looks like",
    "slow": "minutes of measuring or training; those of `teach.md` run by `scripts/test --long`",
}
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
EXAMPLES = {  # architecture → models that have it
    "afmoe": "Trinity",
    "apertus": "Apertus",
    "arcee": "Arcee AFM",
    "arctic": "Snowflake Arctic",
    "arwkv7": "ARWKV 7",
    "baichuan": "Baichuan 1 and 2",
    "bailingmoe": "Ling 1",
    "bailingmoe2": "Ling 2",
    "bailingmoe3": "Ling 3",
    "bert": "BGE, bge-m3, E5, MiniLM, rerankers of BERT and XLM-RoBERTa",
    "bitnet": "BitNet b1.58",
    "bloom": "BLOOM, BLOOMZ",
    "chatglm": "ChatGLM 3, GLM 4 9B",
    "codeshell": "CodeShell",
    "cogvlm": "CogVLM, CogVLM 2",
    "cohere2": "Command R7B, Command A",
    "cohere2moe": "Command A with experts",
    "command-r": "Command R, Command R+",
    "dbrx": "DBRX",
    "deci": "Llama Nemotron Super and Ultra",
    "deepseek": "DeepSeek MoE",
    "deepseek2": "DeepSeek V2, V3 and R1, Kimi K2, Moonlight, GLM 4.7 Flash, Mistral Large 3",
    "deepseek2-ocr": "the text part of DeepSeek OCR",
    "deepseek32": "DeepSeek V3.2",
    "deepseek4": "DeepSeek V4",
    "dots1": "dots.llm1",
    "ernie4_5": "Ernie 4.5",
    "ernie4_5-moe": "Ernie 4.5 MoE",
    "eurobert": "EuroBERT",
    "exaone": "EXAONE 3",
    "exaone-moe": "K-EXAONE",
    "exaone4": "EXAONE 4",
    "falcon": "Falcon 1",
    "falcon-h1": "Falcon H1",
    "gemma": "Gemma 1",
    "gemma-embedding": "EmbeddingGemma",
    "gemma-embedding2": "EmbeddingGemma 2",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gemma3n": "Gemma 3n",
    "gemma4": "Gemma 4",
    "glm-dsa": "GLM 5",
    "glm4": "GLM 4",
    "glm4moe": "GLM 4.5",
    "glm5-next": "GLM 5.3",
    "gpt-oss": "gpt-oss",
    "gpt2": "GPT-2",
    "gptneox": "GPT-NeoX, Pythia",
    "granite": "Granite 3",
    "granite_swa": "Granite with sliding windows",
    "granitehybrid": "Granite 4 H",
    "granitemoe": "Granite 3 MoE",
    "grok": "Grok 1, Grok 2",
    "grovemoe": "GroveMoE",
    "hunyuan-dense": "Hunyuan",
    "hunyuan-moe": "Hunyuan A13B",
    "hunyuan_vl": "Hunyuan VL",
    "hy_v3": "Hunyuan 3",
    "hy_v4": "Hunyuan 4",
    "internlm2": "InternLM 2",
    "jais": "Jais 1",
    "jais2": "Jais 2",
    "jamba": "Jamba",
    "jina-bert-v2": "Jina Embeddings 2, its rerankers",
    "jina-bert-v3": "Jina Embeddings 3",
    "kimi-k3": "Kimi K3",
    "k2-horizon": "K2 Horizon (without experts of values)",
    "kimi-linear": "Kimi Linear",
    "laguna": "Laguna",
    "lfm2": "LFM 2",
    "lfm2moe": "LFM 2 MoE",
    "llama": "Llama 1 to 3, Mistral, Mixtral, SmolLM 1 and 2, TinyLlama",
    "llama-embed": "Llama-Embed-Nemotron",
    "llama4": "Llama 4 Scout and Maverick",
    "maincoder": "Maincoder",
    "mamba": "Mamba, Falcon Mamba",
    "mamba2": "Mamba 2",
    "maple": "Maple",
    "mellum": "Mellum",
    "mimo2": "MiMo V2 Flash",
    "minicpm": "MiniCPM",
    "minicpm3": "MiniCPM 3",
    "minimax-m2": "MiniMax M2",
    "minimax-m3": "MiniMax M3",
    "mistral3": "Ministral 3",
    "mistral4": "Mistral Small 4",
    "modern-bert": "ModernBERT",
    "mpt": "MPT",
    "nanbeige": "Nanbeige 4.2",
    "nemotron": "Nemotron 4, Minitron",
    "nemotron_h": "Nemotron H, Nemotron Nano 2",
    "nemotron_h_moe": "Nemotron 3",
    "neo-bert": "NeoBERT",
    "nomic-bert": "Nomic Embed",
    "nomic-bert-moe": "Nomic Embed 2",
    "olmo": "OLMo 1",
    "olmo2": "OLMo 2 and 3",
    "olmoe": "OLMoE",
    "openelm": "OpenELM",
    "orion": "Orion",
    "paddleocr": "PaddleOCR",
    "pangu-embedded": "Pangu Embedded",
    "phi2": "Phi 1.5 and 2",
    "phi3": "Phi 3 and 4",
    "phimoe": "Phi 3.5 MoE",
    "plamo": "PLaMo",
    "plamo2": "PLaMo 2",
    "plamo3": "PLaMo 3",
    "plm": "PLM",
    "qwen": "Qwen 1",
    "qwen2": "Qwen 1.5 to 2.5",
    "qwen2moe": "Qwen 1.5 and 2 MoE",
    "qwen2vl": "Qwen 2 and 2.5 VL",
    "qwen3": "Qwen 3, its embedders and rerankers",
    "qwen35": "Qwen 3.5 and 3.6",
    "qwen35moe": "Qwen 3.5 and 3.6 MoE",
    "qwen3moe": "Qwen 3 MoE",
    "qwen3next": "Qwen 3 Next",
    "qwen3vl": "Qwen 3 VL",
    "qwen3vlmoe": "Qwen 3 VL MoE",
    "qwen4exp": "Qwen 4, experimental",
    "refact": "Refact",
    "rwkv6": "RWKV 6 (Finch)",
    "rwkv6qwen2": "QRWKV 6",
    "rwkv7": "RWKV 7 (Goose)",
    "seed_oss": "Seed-OSS",
    "smallthinker": "SmallThinker",
    "smollm3": "SmolLM 3",
    "spark2_5": "Spark 2.5",
    "stablelm": "StableLM 1 and 2",
    "starcoder": "StarCoder 1",
    "starcoder2": "StarCoder 2",
    "step35": "Step 3.5 Flash",
    "t5": "T5, Flan T5, MADLAD 400 (prompts are read by an encoder)",
    "talkie": "Talkie",
    "t5encoder": "encoders of T5 and Flan T5, Sentence T5",
    "xverse": "XVERSE",
}
TEXT_OF_VISION = {"gemma3n", "gemma4", "hunyuan_vl", "paddleocr", "qwen2vl", "qwen3vl", "qwen3vlmoe"}


class Doctests(griffe.Extension):
    """Shows the examples of docstrings as code: mkdocstrings takes `>>>` for nested quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """The page with its generated parts, for mkdocs; the search puts guides before experiments."""
    if page is not None and page.file.src_uri.startswith(("experiments/", "internals/")):
        page.meta["search"] = {"boost": 0.1}
    sys.path.insert(0, str(ROOT))
    try:
        return MARK.sub(lambda found: GENERATORS[found[1]](*([found[2]] if found[2] else [])), markdown)
    finally:
        sys.path.remove(str(ROOT))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, which stays: the garbage collector would look at each node again and again."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    gc.freeze()
    return tree


class Block(NamedTuple):
    """A fenced block of a page: it runs, is written to a file that later blocks name, or has a reason not to."""

    language: str
    reason: str
    file: str
    text: str
    line: int


def pages() -> list[Path]:
    """The pages with examples, by their names."""
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(*found.groups(""), text.count("\n", 0, found.start()) + 1) for found in FENCE.finditer(text)]


@cache
def snippets() -> str:
    """The table of pages with examples: how many run, and why the others do not."""
    rows, whole = [], Counter[str]()
    for page in pages():
        reasons = Counter(block.reason for block in blocks(page))
        whole += reasons
        rest = ", ".join(f"{reason}: {n}" for reason, n in sorted(reasons.items()) if reason)
        if reasons:
            rows.append((f"`{page.relative_to(ROOT).as_posix()}`", str(reasons[""]), rest))
    rest = ", ".join(f"{reason}: {n}" for reason, n in sorted(whole.items()) if reason)
    meaning = table(("reason", ""), [(f"`{reason}`", text) for reason, text in REASONS.items()])
    return (
        table(("page", "blocks that run", "blocks that do not"), [*rows, ("all", str(whole[""]), rest)])
        + "\n"
        + meaning
    )


@cache
def cli() -> str:
    """Every command with its flags: names, meaning with environment variable, default."""
    from logitless.cli.command_table import COMMANDS
    from logitless.cli.flags.flags import IGNORED, LATER, WORKS

    parts = [table(("command", ""), [(f"[`{c.name}`](#{c.name.replace(' ', '-')})", c.summary) for c in COMMANDS])]
    for command in COMMANDS:
        parts.append(
            f"## {command.name}\n\n{command.summary}\n\n```sh\nlogitless {command.name} {command.usage}\n```\n"
        )
        flags = [(group.title, flag) for group in command.groups for flag in group.flags]
        for title in dict.fromkeys(title for title, _ in flags):
            rows = [_flag(flag) for of, flag in flags if of == title and flag.status == WORKS]
            if rows:
                parts.append(f"**{title}**\n\n" + table(("flag", "meaning", "default"), rows))
        for status, title in ((IGNORED, "Accepted without effect"), (LATER, "Refused: not supported")):
            names = [f"`{name}`" for _, f in flags if f.status == status for name in (*f.all_names, *f.off_names)]
            if names:
                parts.append(f"**{title}**\n\n{' '.join(names)}\n")
    return "\n".join(parts)


def _flag(flag: Any) -> tuple[str, str, str]:
    names = " ".join(f"`{name}`" for name in (*flag.all_names, *flag.off_names))
    default = ""
    if flag.off_names:
        default = "on" if flag.default else "off"
    elif flag.takes_value and flag.default not in (None, "", [], ()):
        shown = flag.default if isinstance(flag.default, (list, tuple)) else [flag.default]
        default = f"`{','.join(map(str, shown))}`"
    value = f" {flag.metavar}" if flag.takes_value else ""
    variables = "".join(f" `{name}`" for name in flag.env.split())
    return names + value, _plain(flag.help) + variables, default


@cache
def hyperparameters() -> str:
    """Every hyperparameter of training: its names in Python, on the command line and in jobs."""
    from logitless.cli.flags.options_training import HYPERPARAMETERS
    from logitless.training.config import DEFAULTS, FIELDS, NONE

    rows = []
    for name, (_, param) in FIELDS.items():
        flag = HYPERPARAMETERS.get(name)
        job = "" if param.job == NONE else f"`{param.job or name}`"
        default = "" if DEFAULTS[name] in (None, "", (), {}) else f"`{DEFAULTS[name]}`"
        meaning = _plain(param.doc) + (f" ({', '.join(param.methods)})" if param.methods else "")
        rows.append((f"`{name}`", "" if flag is None else f"`{flag.long}`", job, default, meaning))
    return table(("field", "flag", "in jobs", "default in Python", "meaning"), rows)


def _plain(text: str) -> str:
    """Text in which nothing is markup."""
    return re.sub(r"([*_<\[])", r"\\\1", text)


@cache
def http() -> str:
    """Every endpoint by its tag, with its aliases and the fields of its body."""
    from logitless.server.openapi.reference import markdown

    return markdown()


@cache
def errors() -> str:
    """Every error line by its kind, with cause and cure."""
    from scripts import error_lines

    return error_lines.markdown()


@cache
def models() -> str:
    """The table of architectures: example models, uses, attention, training."""
    from logitless.models.architectures.registry import ARCHITECTURES

    missing = sorted(set(ARCHITECTURES) ^ set(EXAMPLES))
    if missing:
        raise ValueError(f"scripts/docs_pages.py: EXAMPLES and the registry of architectures differ in {missing}")
    rows = []
    for name in sorted(ARCHITECTURES):
        attention = ARCHITECTURES[name].attention
        use = "text" if attention.causal else "embeddings, reranking"
        if name in TEXT_OF_VISION:
            use = "text (the text part of a vision model)"
        rows.append((f"`{name}`", EXAMPLES[name], use, "yes" if attention.causal and not attention.cross else "no"))
    return f"{len(rows)} architectures.\n\n" + table(("architecture", "example models", "served for", "training"), rows)


@cache
def modules(package: str) -> str:
    """The packages and modules below a package, each with the first paragraph of its docstring."""
    rows = []
    for path in sorted((ROOT / package).rglob("*.py")):
        doc = ast.get_docstring(parsed(path)) or ""
        name = path.relative_to(ROOT / package).as_posix().removesuffix("__init__.py")
        if doc and name:
            rows.append((f"`{name}`", _plain(" ".join(doc.split("\n\n")[0].split()))))
    if not rows:
        raise ValueError(f"a page names the package {package}, which has no modules")
    return table((f"`{package}/`", ""), rows)


@cache
def file(path: str) -> str:
    """A file of the repository, with its links as the site has them."""
    text = (ROOT / path).read_text(encoding="utf-8")
    text = text.replace("](docs/", "](").replace("](CHANGELOG.md)", "](changelog.md)")
    text = text.replace("](CONTRIBUTING.md)", "](contributing.md)").replace("](README.md", "](index.md")
    return re.sub(r"\[([^\]]+)\]\((?:LICENSE|scripts/[^)]*|[a-z]+/)\)", r"\1", text)


def huggingface() -> str:
    """A row for each architecture that a Hugging Face folder may have."""
    from logitless.models.huggingface.families.rows import FAMILIES

    archs = sorted({family.arch for family in FAMILIES.values()})
    names = {
        arch: [f"`{name.split()[0]}`" for name, family in FAMILIES.items() if family.arch == arch] for arch in archs
    }
    return table(("`architectures`", "in GGUF"), [(", ".join(names[arch]), f"`{arch}`") for arch in archs])


GENERATORS: dict[str, Callable[..., str]] = {
    "cli": cli,
    "http": http,
    "hyperparameters": hyperparameters,
    "errors": errors,
    "models": models,
    "huggingface": huggingface,
    "modules": modules,
    "snippets": snippets,
    "file": file,
}
