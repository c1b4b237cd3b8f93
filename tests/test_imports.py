"""Architecture rules: import directions, import cycles, package sizes, packaging."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAY_IMPORT: dict[str, set[str]] = {  # package → the packages below it
    "graph": set(),
    "backends": {"graph"},
    "models": {"graph"},
    "training": {"models", "graph"},
    "engine": {"training", "models", "graph"},
    "frontend": {"engine", "training", "models", "graph"},
    "server": {"frontend", "engine", "training", "models", "graph"},
    "router": {"server", "frontend", "engine", "training", "models", "graph"},
    "cli": {"router", "server", "frontend", "engine", "training", "models", "graph"},
}
MAY_IMPORT |= {package: {"backends", *MAY_IMPORT} for package in ("logitless", "extras")}
FACE = "logitless"  # modules beside the links to the packages; only extras import them
FOR_ALL = {"logitless", "logitless.hooks"}  # the package itself, and the rows of the extras
OURS = tuple(package for package in MAY_IMPORT if package != FACE)
MAX_LINES = 800
MAX_MODULES = 12  # of one package, beside its __init__.py
OPENS_BACKENDS = ("engine/runner/model_runner.py", "engine/loading/open_model.py", "cli/")
ONLY_IN = {  # third-party module → the only places that may import it
    "aiohttp": ("server/", "router/", "extras/"),
    "asyncio": ("engine/", "frontend/", "server/", "router/", "cli/", "logitless/", "extras/"),
    "datasets": ("training/data/sources.py",),
    "ray": ("extras/ray/",),
    "yaml": ("extras/ray/config.py",),
    "pyarrow": ("training/data/sources.py",),
    "numba": ("backends/cpu/kernels/", "backends/cpu/compiler/numba_frontend.py"),
    "llvmlite": (
        "backends/cpu/kernels/",
        "backends/cpu/compiler/llvm.py",
        "backends/host.py",
        "backends/opencl/native_launch.py",
    ),
    "pyopencl": ("backends/opencl/",),
    "vulkan": ("backends/vulkan/",),
    "tokenizers": ("models/tokenizer/", "models/huggingface/tokens/pretokenizer.py"),
    "llguidance": ("models/grammar/",),
    "re2": ("models/grammar/", "extras/tools/built_in/patterns.py"),
    **dict.fromkeys(("anyio", "httpx2", "mcp", "mcp_types"), ("extras/tools/mcp/link.py",)),
    "jinja2": ("models/",),
    "prometheus_client": ("server/", "engine/", "router/metrics.py"),
    "rich": ("cli/",),
    "PIL": ("training/reporting/plot.py", "models/vision/"),
    "soundfile": ("models/audio/decode.py",),
    "wandb": ("training/reporting/trackers.py",),
    "mlflow": ("training/reporting/trackers.py",),
    "tensorboardX": ("training/reporting/trackers.py",),
    "huggingface_hub": ("cli/hub/",),
    "yarl": ("server/asgi.py", "router/"),
}
GRAPH_IMPORTS = {"numpy", "gguf"}  # beside the standard library
LAZY = {  # may be imported inside functions only
    "numba": ("backends/cpu/compiler/numba_frontend.py",),
    "pyopencl": ("backends/opencl/backend.py", "backends/opencl/devices.py"),
    "vulkan": ("backends/vulkan/",),
    "llguidance": ("models/grammar/",),
    "re2": ("models/grammar/",),
    "huggingface_hub": ("cli/hub/hub.py",),
    "PIL": ("training/reporting/plot.py", "models/vision/"),
    "soundfile": ("models/audio/decode.py",),
}
EXTRAS = (
    "plot",
    "audio",
    "data",
    "ray",
    "kv-events",
    "otel",
    "mcp",
    "wandb",
    "mlflow",
    "tensorboard",
)  # whose packages are imported
NOT_NAMES = {"utils", "helpers", "common"}

SOURCES = sorted([*(path for package in OURS for path in (ROOT / package).rglob("*.py")), *(ROOT / FACE).glob("*.py")])
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")  # of statements


@cache
def every_import(path: Path) -> tuple[tuple[str, bool, bool], ...]:
    """(module, whether at the top of the file, whether for type checkers only) of every import."""
    found: list[tuple[str, bool, bool]] = []
    work: list[tuple[ast.AST, bool, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), True, False)]
    while work:
        node, top, types = work.pop()
        if isinstance(node, ast.Import):
            found += ((alias.name, top, types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            ours = node.module in MODULES
            names = {submodule(node.module, alias.name) for alias in node.names} if ours else {node.module}
            found += ((name, top, types) for name in names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            work += [*((child, top, types) for child in node.orelse), *((child, top, True) for child in node.body)]
        else:
            top = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            work += [(child, top, types) for field in BODIES for child in getattr(node, field, ())]
    return tuple(found)


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top of the file) of every import that runs."""
    return [(module, top) for module, top, types in every_import(path) if not types]


def module_name(path: Path) -> str:
    """`graph/ops/norm.py` → `logitless.graph.ops.norm`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == FACE else parts
    return ".".join(("logitless", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def submodule(package: str, name: str) -> str:
    """The module that `from package import name` loads: the submodule of that name, else the package."""
    return f"{package}.{name}" if f"{package}.{name}" in MODULES else package


MODULES = {module_name(path) for path in SOURCES}


def wrong_imports(path: Path) -> Iterator[str]:
    """A line for each import that a rule forbids."""
    name = path.relative_to(ROOT).as_posix()
    package = name.split("/", maxsplit=1)[0]
    allowed = MAY_IMPORT[package] | {package} | ({"backends"} if name.startswith(OPENS_BACKENDS) else set())
    for module, top in imports(path):
        base, _, rest = module.partition(".")
        room = rest.partition(".")[0]
        if base in OURS:
            yield f"{name} imports {module}: the one name is logitless.{module}"
        if rest.startswith("backends.cpu") and not name.startswith(("backends/cpu/", "backends/registry.py")):
            yield f"{name} imports {module}: ask backends.registry"
        if base == "logitless" and room in OURS and room not in allowed:
            yield f"{name} imports {module}, but {package} may import only {sorted(allowed)}"
        if base == "logitless" and room not in OURS and package not in (FACE, "extras") and module not in FOR_ALL:
            yield f"{name} imports {module}: only extras import the face"
        if package == room == "extras":
            own = f"logitless.extras.{path.relative_to(ROOT).parts[1]}"
            if not f"{module}.".startswith(f"{own}."):
                yield f"{name} imports {module}: extras do not know one another"
        if base in ONLY_IN and not name.startswith(ONLY_IN[base]):
            yield f"{name} imports {module}, which belongs into {ONLY_IN[base]}"
        if base in LAZY and name.startswith(LAZY[base]) and top:
            yield f"{name} imports {module} at its top; it must be inside a function"
        if package == "graph" and base != "logitless" and not is_standard(base) and base not in GRAPH_IMPORTS:
            yield f"{name} imports {module}"
        if base == "tests":
            yield f"{name} imports {module}"


def test_imports_run_one_way() -> None:
    assert [line for path in SOURCES for line in wrong_imports(path)] == []


@cache
def import_graph() -> dict[str, set[str]]:
    """Every module with the modules of ours that it imports: at its top, inside a function, or for its types only."""
    found = {module_name(path): {module for module, *_ in every_import(path)} for path in SOURCES}
    return {name: (imported & MODULES) - {name} for name, imported in found.items()}


def test_no_import_cycles() -> None:
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' → '.join(error.args[1])}")


def test_the_python_api_loads_few_modules_and_neither_server_nor_aiohttp() -> None:
    code = (
        "import sys, logitless.async_llm; print(len(sys.modules)); import logitless.llm, logitless.frontend.graders\n"
        "print(*(m for m in sys.modules if m.startswith(('logitless.server', 'aiohttp'))))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    n, *names = loaded.stdout.split()
    assert int(n) <= 520
    assert names == []


TABLES = {  # that have modules by name, and import one when a command, route or public name is used
    *("logitless/__init__.py", "logitless/hooks.py", "cli/command.py", "cli/main.py", "server/routes.py"),
    *("graph/__init__.py", "graph/testing/conformance.py", "backends/cpu/compiler/llvm.py"),
    *("server/observing/tracing.py", "training/graders/parse.py"),  # of other projects
}


def test_own_modules_are_imported_by_statements_but_for_tables_of_names() -> None:
    """Cycles cannot hide: `import_graph` sees statements only."""
    calls = re.compile(r"\b(?:import_module|__import__)\(")
    users = {path.relative_to(ROOT).as_posix() for path in SOURCES if calls.search(path.read_text(encoding="utf-8"))}
    assert users - TABLES == set()


def is_standard(module: str) -> bool:
    return module in sys.stdlib_module_names


def test_files_are_short_and_well_named() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: n for path, n in lines.items() if n > MAX_LINES} == {}
    assert [path for path in SOURCES if path.stem in NOT_NAMES] == []


def test_names_of_tests_begin_with_their_subject() -> None:
    vague = re.compile(r"^ *(?:async )?def (test_(?:what|who|whoever|whom|whose|which|that|nobody)_\w+)", re.MULTILINE)
    names = {name for path in (ROOT / "tests").rglob("*.py") for name in vague.findall(path.read_text("utf-8"))}
    assert names == set()


def test_packages_have_few_modules() -> None:
    modules = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    crowded = {str(folder.relative_to(ROOT)): n for folder, n in modules.items() if n > MAX_MODULES}
    assert not crowded, f"packages with more than {MAX_MODULES} modules"


def test_every_folder_is_a_package_linked_below_logitless() -> None:
    for folder in {path.parent for path in SOURCES}:
        assert (folder / "__init__.py").exists(), f"{folder.relative_to(ROOT)} has no __init__.py"
    for package in OURS:
        assert (ROOT / "logitless" / package).resolve() == ROOT / package


def test_dependencies_in_pyproject_are_those_imported() -> None:
    """Nothing is installed for nobody, and nothing is imported that comes only by way of another package."""
    import_names = {
        "prometheus-client": "prometheus_client",
        "google-re2": "re2",
        "huggingface-hub": "huggingface_hub",
        "pillow": "PIL",
        "mcp-types": "mcp_types",
        "pyyaml": "yaml",
        "pyzmq": "zmq",
        "mlflow-skinny": "mlflow",
        "opentelemetry-sdk": "opentelemetry",
        "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    }
    project = PYPROJECT["project"]
    required = [*project["dependencies"], *(r for extra in EXTRAS for r in project["optional-dependencies"][extra])]
    declared = {requirement.split(">")[0].split("[")[0] for requirement in required}
    wanted = {import_names.get(name, name) for name in declared}
    used = {module.split(".")[0] for path in SOURCES for module, _ in imports(path)}
    used.add("vulkan")  # backends/vulkan/api.py loads its declarations by their path
    third_party = {name for name in used if not is_standard(name) and name != "logitless"}
    assert third_party <= wanted, f"imported but not declared: {sorted(third_party - wanted)}"
    assert wanted <= third_party, f"declared but not imported: {sorted(wanted - third_party)}"
