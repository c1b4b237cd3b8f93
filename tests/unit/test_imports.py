"""The directions of DESIGN §2, read from the sources: who may import whom, how large a file is, what is packaged."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = ("graph", "backends", "models", "training", "server")
MAX_LINES = 500
MAY_IMPORT = {
    "graph": {"graph"},
    "backends": {"backends", "graph"},
    "models": {"models", "graph"},
    "training": {"training", "models", "graph"},
    "server": {"server", "training", "models", "graph"},
}
OPENS_BACKENDS = ("server/engine.py", "server/cli/")
ONLY_IN = {  # third-party module → the only places that may import it
    "aiohttp": ("server/http/", "server/router/"),
    "asyncio": ("server/",),
    "numba": ("backends/cpu/kernels/", "backends/cpu/frontend.py"),
    "llvmlite": (
        "backends/cpu/kernels/",
        "backends/cpu/compile.py",
        "backends/cpu/isa.py",
        "backends/opencl/native.py",
    ),
    "pyopencl": ("backends/opencl/",),
    "vulkan": ("backends/vulkan/",),
    "tokenizers": ("models/tokenizer/",),
    "llguidance": ("models/grammar/",),
    "re2": ("models/grammar/",),
    "jinja2": ("models/",),
    "prometheus_client": ("server/",),
    "rich": ("server/cli/",),
    "PIL": ("training/plot.py",),
    "huggingface_hub": ("server/cli/hub.py",),
    "yarl": ("server/router/",),
}
GRAPH_IMPORTS = {"numpy", "gguf"}  # beside the standard library
LAZY = {  # may be imported inside functions only
    "numba": ("backends/cpu/frontend.py",),
    "pyopencl": ("backends/opencl/backend.py", "backends/opencl/devices.py"),
    "vulkan": ("backends/vulkan/",),
    "llguidance": ("models/grammar/",),
    "re2": ("models/grammar/",),
    "huggingface_hub": ("server/cli/hub.py",),
    "PIL": ("training/plot.py",),
}
NOT_NAMES = {"utils", "helpers", "common", "manager"}

SOURCES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))
IDS = [str(path.relative_to(ROOT)) for path in SOURCES]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether at the top of the file) of every import, except those for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    work: list[tuple[ast.AST, bool]] = [(node, True) for node in tree.body]
    while work:
        node, top = work.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module, top
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            work += [(child, top) for child in node.orelse]
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            work += [(child, top and not inside) for child in ast.iter_child_nodes(node)]


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_imports_run_one_way(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    package = name.split("/", maxsplit=1)[0]
    for module, top in imports(path):
        base = module.split(".")[0]
        if base in OURS:
            allowed = MAY_IMPORT[package] | ({"backends"} if name.startswith(OPENS_BACKENDS) else set())
            assert base in allowed, f"{name} imports {module}, but {package} may import only {sorted(allowed)}"
        if base in ONLY_IN:
            assert name.startswith(ONLY_IN[base]), f"{name} imports {module}, which belongs into {ONLY_IN[base]}"
        if base in LAZY and name.startswith(LAZY[base]):
            assert not top, f"{name} imports {module} at its top; it must be inside a function"
        if package == "graph" and base not in OURS:
            assert is_standard(base) or base in GRAPH_IMPORTS, f"{name} imports {module}"
        assert base != "tests", f"{name} imports {module}"


def is_standard(module: str) -> bool:
    import sys

    return module in sys.stdlib_module_names


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_files_are_short_and_well_named(path: Path) -> None:
    n_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert n_lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {n_lines} lines, more than {MAX_LINES}"
    assert path.stem not in NOT_NAMES


def test_packages_in_pyproject_are_the_folders() -> None:
    folders = {path.relative_to(ROOT).parent.as_posix().replace("/", ".") for path in SOURCES}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)
    for folder in folders:
        assert (ROOT / folder.replace(".", "/") / "__init__.py").exists(), f"{folder} has no __init__.py"


def test_dependencies_in_pyproject_are_those_imported() -> None:
    """Nothing is installed for nobody, and nothing is imported that comes only by way of another package."""
    import_names = {
        "prometheus-client": "prometheus_client",
        "google-re2": "re2",
        "huggingface-hub": "huggingface_hub",
        "pillow": "PIL",
    }
    project = PYPROJECT["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["plot"]]
    declared = {requirement.split(">")[0] for requirement in required}
    wanted = {import_names.get(name, name) for name in declared}
    used = {module.split(".")[0] for path in SOURCES for module, _ in imports(path)}
    third_party = {name for name in used if not is_standard(name) and name not in OURS}
    assert third_party <= wanted, f"imported but not declared: {sorted(third_party - wanted)}"
    assert wanted <= third_party, f"declared but not imported: {sorted(wanted - third_party)}"


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them by their name alone: of two that are alike it would run only one."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
