"""Documents: paths exist, commands parse, sizes are bounded, docstrings name their subject."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from logitless.cli.command_table import COMMANDS
from logitless.cli.flags.flags import parse
from logitless.cli.main import main
from logitless.models.architectures.registry import ARCHITECTURES
from scripts import docs_pages, error_lines
from tests.helpers.paths import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GUIDES = [page for page in PAGES if page.parent.name != "experiments"]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}
CODE = ("graph", "backends", "models", "training", "engine", "frontend", "server", "router", "cli", "extras")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return [block.text for block in docs_pages.blocks(page) if block.language == language]


def commands(page: Path) -> list[list[str]]:
    """The words of every line of a page's shell blocks that calls `logitless`."""
    lines = [line for text in blocks(page, "sh") for line in text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("logitless ")]


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_paths_in_backticks_exist(page: Path) -> None:
    text = docs_pages.FENCE.sub("", page.read_text(encoding="utf-8"))
    for path in re.findall(r"`([\w.]+/[\w./-]*[\w/])`", text):
        if path.split("/")[0] in FOLDERS and "…" not in path:
            assert (ROOT / path).exists(), f"{name(page)} names {path}"


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_prose_has_at_most_100_columns(page: Path) -> None:
    text = docs_pages.FENCE.sub("", page.read_text(encoding="utf-8"))
    long = [line for line in text.splitlines() if len(line) > 100 and not line.startswith(("|", "![", "#", "["))]
    assert long == []


@pytest.mark.parametrize("page", [page for page in GUIDES if commands(page)], ids=name)
def test_commands_parse(page: Path) -> None:
    by_name = {command.name: command for command in COMMANDS}
    for words in commands(page):
        if words[0] == "--version":
            continue
        command = by_name.get(" ".join(words[:2])) or by_name[words[0]]
        arguments = words[len(command.name.split()) :]
        flags = [flag for group in command.groups for flag in group.flags]
        if "<" in arguments:
            arguments = arguments[: arguments.index("<")]
        parse(flags, [word for word in arguments if word != "…"], {}, command.words)


def test_no_file_cites_a_document_that_is_not_here() -> None:
    cited = re.compile(r"CHECKLIST|\bDESIGN\b|API\.md|\bLOG\.md|HOUSE\.md|[Rr]ule 6")
    sources = [path for folder in (*CODE, "tests", "scripts", "docs") for path in (ROOT / folder).rglob("*.*")]
    texts = [path for path in sources if path.suffix in (".py", ".md", ".js", "") and path.name != "test_docs.py"]
    assert [name(path) for path in texts if cited.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("package", [*CODE, "logitless"])
def test_docstrings_begin_with_their_subject(package: str) -> None:
    """The first word is no question word: a docstring says first what its object is."""
    openers = {"What", "Who", "Whose", "Whether", "Which", "Where", "When", "How", "Of", "That", "Those"}
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if any(parent.is_symlink() for parent in path.parents):
            continue
        for node in ast.walk(docs_pages.parsed(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "A").split()
                if words[0] in openers:
                    found.append(f"{path.relative_to(ROOT)}: {' '.join(words[:8])}")
    assert found == []


MODULES = sorted(path for folder in (*CODE, "examples", "scripts", "tests") for path in (ROOT / folder).rglob("*.py"))
MODULES += sorted((ROOT / "logitless").glob("*.py"))


def summary(path: Path) -> str:
    """The first line of a module's docstring."""
    found = re.match(r'(?:#.*\n)*"""(.*?)(?:"""|\n)', path.read_text(encoding="utf-8"))
    return found[1] if found else ""


def test_each_module_begins_with_a_sentence_that_names_its_subject() -> None:
    """One line is enough: it is whole, and has no pronoun in the place of a noun."""
    modules = [path for path in MODULES if path.name != "__init__.py" or path.read_bytes()]
    vague = re.compile(r"\b(what|who|whom|whoever|whatever|somebody|nobody|those who|that which)\b", re.IGNORECASE)
    lines = {name(path): summary(path) for path in modules}
    assert {path: line for path, line in lines.items() if not line.endswith(".")} == {}
    assert {path: line for path, line in lines.items() if vague.search(line)} == {}


@pytest.mark.parametrize(
    ("term", "rooms"),
    [
        ("prefill", "engine/scheduler/step_budget.py engine/scheduler/interleaved_prefill.py"),
        ("chunked prefill", "engine/scheduler/step_budget.py"),
        ("KV cache", "engine/kv_cache/__init__.py engine/kv_cache/manager.py"),
        ("prefix cache", "engine/kv_cache/prefix_cache.py"),
        ("preempt", "engine/scheduler/running_set.py engine/runner/preemptible_prefill.py"),
        ("RoPE", "models/architectures/rope.py graph/ops/rope.py backends/cpu/kernels/rope.py backends/gpu/rope.py"),
        ("attention scores", "graph/ops/attention/paged_attention.py"),
        ("attention scores", "backends/cpu/kernels/attention/paged_attention.py"),
        ("attention scores", "backends/gpu/attention/paged_attention.py"),
        ("speculative decoding", "engine/speculation/__init__.py"),
        ("draft", "engine/speculation/draft_state.py engine/speculation/draft_model.py"),
        ("sampler chain", "graph/ops/sampling/samplers.py engine/sampling/sampler.py"),
        ("sampler chain", "backends/cpu/kernels/sampling/samplers.py backends/gpu/sampling/__init__.py"),
        ("grammar mask", "engine/sampling/grammar_mask.py"),
        ("LoRA", "models/adapters/lora.py models/adapters/stacked_lora.py training/trainable.py"),
        ("gradient checkpointing", "graph/gradient_checkpointing.py"),
        ("optimizer step", "graph/ops/training/optimizer.py training/step.py"),
        ("graph partition", "graph/execution/partition.py"),
        ("memory planning", "graph/execution/memory.py"),
        ("continuous batching", "engine/scheduler/__init__.py engine/scheduler/scheduler.py"),
        ("paged attention", "graph/ops/attention/paged_attention.py backends/cpu/kernels/attention/paged_attention.py"),
        ("paged attention", "backends/gpu/attention/paged_attention.py"),
        ("thread pool", "backends/cpu/threads/pool.py"),
        ("sliding window", "engine/kv_cache/sliding_window.py"),
        ("beam search", "logitless/jobs.py"),
        ("logprobs", "frontend/replies/probabilities.py"),
        ("block table", "engine/kv_cache/block_table.py"),
        ("stop string", "engine/sampling/stop_filter.py"),
        ("mixture of experts", "graph/ops/moe.py"),
        ("n-gram", "engine/speculation/ngram.py"),
        ("data-parallel", "training/parallel/coordinator.py"),
        ("learning rate", "training/schedule.py"),
        ("affinity", "backends/cpu/threads/affinity.py"),
    ],
)
def test_a_term_of_the_field_is_in_the_first_line_of_the_modules_that_define_it(term: str, rooms: str) -> None:
    """`grep -rniI --include='*.py' TERM`: hits on line 1 are the modules to read."""
    assert [room for room in rooms.split() if term.lower() not in summary(ROOT / room).lower()] == []


@pytest.mark.parametrize(
    ("word", "pages"),
    [
        ("nginx", "proxy"),
        ("caddy", "proxy"),
        ("docker", "kubernetes"),
        ("concurrent", "operations"),
        ("troubleshooting", "troubleshooting"),
        ("windows", "systems"),
        ("langchain", "integrations"),
        ("claude code", "agents"),
        ("16 gb", "first-models"),
    ],
)
def test_the_search_finds_the_page_of_a_word(word: str, pages: str) -> None:
    """mkdocs searches the words of the pages of `nav`, in which --strict wants every page."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in pages.split():
        assert f" {page}.md\n" in nav
        assert word in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").lower()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_configurations_in_json_toml_and_yaml_can_be_read(page: Path) -> None:
    for text in blocks(page, "json"):
        json.loads(text)
    for text in blocks(page, "toml"):
        tomllib.loads(text)
    for text in blocks(page, "yaml"):
        list(yaml.safe_load_all(text))


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 1000


def test_the_readme_counts_the_architectures() -> None:
    assert f"[{len(ARCHITECTURES)} architectures](docs/models.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_changelog_is_short() -> None:
    """Its merge driver is union: a rebase may bring back lines that were condensed, and this test tells."""
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert len(lines) <= 190
    assert [heading for heading in headings if heading.startswith("## ")] == ["## Unreleased", "## 0.1.0"]
    assert set(headings[1:]) <= {
        "## Unreleased",
        "## 0.1.0",
        *(f"### {kind}" for kind in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")),
    }


def test_the_glossary_has_at_most_60_terms_and_their_equivalents() -> None:
    rows = re.findall(r"^\| (.*) \|$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)[1:]
    terms = [row.split(" | ") for row in rows]
    assert 0 < len(terms) <= 60
    assert all(len(term) == 4 and all(term) for term in terms)
    assert terms == sorted(terms, key=lambda term: term[0].lower())


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "experiments"], ids=name)
def test_experiments_say_what_was_tried_measured_and_kept(page: Path) -> None:
    for entry in page.read_text(encoding="utf-8").split("\n### ")[1:]:
        assert re.findall(r"^\* \*\*(\w+)\*\*", entry, re.MULTILINE) == ["Tried", "Measured", "Kept"], entry


def test_generated_pages_name_every_command_endpoint_and_architecture() -> None:
    cli, http, models = docs_pages.cli(), docs_pages.http(), docs_pages.models()
    assert all(f"## {command.name}\n" in cli for command in COMMANDS)
    assert "`--ctx-size`" in cli
    assert "### POST /v1/chat/completions\n" in http
    assert "`temperature`" in http
    assert "| `llama` |" in models


@pytest.mark.parametrize("package", CODE)
def test_each_package_has_a_page_that_lists_its_modules(package: str) -> None:
    page = (ROOT / "docs" / "internals" / f"{package}.md").read_text(encoding="utf-8")
    assert f"<!-- generated: modules {package} -->" in page
    assert docs_pages.on_page_markdown(page).count("\n| `") >= len(list((ROOT / package).rglob("[a-z]*.py"))) - 1


# Error lines of docs/troubleshooting.md: each class has a cause and a cure, real errors have their line

INSIDE = {  # errors that another part of the product answers: no user sees them by themselves
    *("CallFailed", "ClientLeft", "DeviceLost", "DownloadFailed", "Flood", "GradeFault", "NotACall", "NotLinkable"),
    *("OutOfArena", "PrivateAddress", "QueueLost", "StartFailed", "StepFailed", "Unfetched"),
    *("WorkerLost", "DeviceFailed", "ReplicaEnded"),
}


def test_every_error_class_has_a_cause_and_a_cure() -> None:
    bases = {node.name: [error_lines._name(base) for base in node.bases] for node in error_lines.calls().classes}
    every = {name for name, of in bases.items() if any(re.fullmatch(r"\w*(Error|Exception)", base) for base in of)}
    public = {name for name in every if not name.startswith("_")}
    assert public - set(error_lines.classes()) - INSIDE == set()
    assert set(error_lines.KINDS) <= set(error_lines.lines())


def test_the_page_has_every_line_that_the_code_can_say() -> None:
    page = docs_pages.on_page_markdown((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    sites = {
        line
        for call in error_lines.calls().raised
        if call.args and error_lines._name(call.func) in error_lines.classes()
        for line in error_lines.text(call.args[0])
        if " " in line.strip("… :")
    }
    assert len(sites) > 500
    assert [line for line in sites if f"`` {' '.join(line.split())} ``" not in page] == []


@cache
def patterns() -> list[re.Pattern[str]]:
    return [
        re.compile(".*".join(re.escape(" ".join(part.split())) for part in line.split("…")))
        for of in error_lines.lines().values()
        for line in of
        if len(line.replace("…", "").strip()) > 8
    ]


@pytest.mark.parametrize(
    "words",
    [
        "serve -m M --no-such-flag",
        "serve -m nothing.gguf",
        "generate -m F -p a",
        "perplexity -m M",
        "perplexity -m M -f F -c 100000",
        "finetune -m M --file F --lora-out O --epochs 1",
        "quantize M",
    ],
)
def test_an_error_of_the_command_line_has_its_line(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f"
    file.write_text("no model and no rows\n")
    names = {"M": str(ROOT / "models" / "demo" / "shakespeare.gguf"), "F": str(file), "O": str(tmp_path / "o.gguf")}
    assert main([names.get(word, word) for word in shlex.split(words)]) in (1, 2)
    said = capsys.readouterr().err.strip().splitlines()[-1].removeprefix("logitless: ")
    assert any(pattern.search(said) for pattern in patterns()), said


def test_no_line_is_code_or_a_statement_of_a_database() -> None:
    """A function of a common name, called elsewhere, would bring what it gets as an error line."""
    every = {line for of in error_lines.lines().values() for line in of}
    assert [
        line for line in every if re.match(r"(select|delete|insert|update) |.*[\[(]\w+ [*+] |train: iter", line)
    ] == []
    assert "its header has no boundary" in every  # through a helper that has the words before it
    assert "is not a range of processors, such as 0-3" in every


def test_a_message_that_a_helper_takes_is_found_at_its_calls() -> None:
    assert error_lines.text(ast.parse("f'{a}: no b' if c else 'd' + e", mode="eval").body) == ["…: no b", "d…"]
    assert error_lines.text(ast.parse("str(error)", mode="eval").body) == []
