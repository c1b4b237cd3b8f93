"""Packaging: hostile folders and distributions, and the contents of a wheel."""

from __future__ import annotations

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PACKAGES = ("backends", "cli", "engine", "extras", "frontend", "graph", "models", "router", "server", "training")
OLDEST, NEWEST = (3, 11), (3, 14)
RAISES = "raise SystemExit('a module of another project was imported: ' + __name__)\n"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A project whose folders are called like our packages, and that fails when one is imported."""
    folder = tmp_path / "project"
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(RAISES)
    for name in ("options", "sampler", "tensor", "errors", "tests", "requests"):
        (folder / f"{name}.py").write_text(RAISES)
    return folder


def run(*command: str | Path, cwd: Path, path: str = "", **environment: str) -> str:
    """What a process prints that has `path` as its PYTHONPATH, of which the checkout is the last part."""
    parts = os.pathsep.join(filter(None, [path, str(ROOT)]))
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": parts, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


GENERATE = ("-p", "ROMEO:", "-n", "3", "--temp", "0", "-t", "1")
DEMO = ROOT / "models" / "demo" / "shakespeare.gguf"


def test_the_command_in_a_hostile_folder(hostile: Path) -> None:
    for name in ("numpy", "jinja2", "numba", "aiohttp"):  # `python -m` looks for them in the working directory first
        (hostile / f"{name}.py").write_text(RAISES)
    text = run(sys.executable, "-m", "logitless", "generate", "-m", DEMO, *GENERATE, cwd=hostile)
    assert text.strip()
    assert run(sys.executable, "-m", "logitless", "--version", cwd=hostile, path=str(hostile / "x")).startswith(
        "logitless "
    )


def test_the_command_with_a_hostile_path(hostile: Path) -> None:
    command = (sys.executable, "-m", "logitless", "generate", "-m", DEMO, *GENERATE)
    assert run(*command, cwd=ROOT, path=str(hostile)).strip()


def test_the_python_api_in_a_hostile_script(hostile: Path) -> None:
    """The folder of a script comes first on its path."""
    script = hostile / "main.py"
    script.write_text(
        "from logitless import LLM, SamplingParams\n"
        "with LLM(threads=1) as llm:\n"
        "    print(llm.generate('ROMEO:', SamplingParams(temperature=0, max_tokens=3)).finish_reason)\n"
    )
    assert run(sys.executable, script, cwd=hostile) == "length\n"


def test_processes_that_compile_ignore_the_working_directory(hostile: Path, tmp_path: Path) -> None:
    for name in ("numpy", "numba", "llvmlite", "logging", "logitless"):
        (hostile / f"{name}.py").write_text(RAISES)
    code = (
        "import os; from logitless.backends.cpu.compiler.workers import CompileWorkers\n"
        "os.chdir(os.environ['HOSTILE'])\n"
        "workers = CompileWorkers(lambda *_: None, lambda *_: None); workers.submit(['KERNEL'])\n"
        "print(len(workers.result('KERNEL')) > 100)\n"
    ).replace("KERNEL", "rms_norm")
    assert run(sys.executable, "-c", code, cwd=tmp_path, HOSTILE=str(hostile)) == "True\n"


def test_a_models_server_in_a_hostile_folder(hostile: Path) -> None:
    """The router starts its children from the same installation, whatever the working directory has."""
    code = (
        "import asyncio, os, subprocess\n"
        "from logitless.router.process import spawn\n"
        "async def main():\n"
        "    child = await spawn(['--version'], dict(os.environ), subprocess.PIPE)\n"
        "    out, err = await child.communicate()\n"
        "    print(child.returncode, out.decode(), err.decode())\n"
        "asyncio.run(main())\n"
    )
    (hostile / "logitless.py").write_text(RAISES)
    (hostile / "asyncio.py").write_text(RAISES)
    script = hostile.parent / "router.py"
    script.write_text(code)
    told = run(sys.executable, script, cwd=hostile)
    assert told.startswith("0 logitless ")


# -- Python versions

REMOVED = {  # modules of 3.11 that 3.12 or 3.13 has no more
    *("aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils", "imghdr", "imp"),
    *("lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau"),
    *("telnetlib", "uu", "xdrlib"),
}


def test_the_oldest_python_reads_every_module_and_the_newest_has_what_they_import() -> None:
    for path in [*(ROOT / "logitless").glob("*.py"), *(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        ast.parse(text, feature_version=OLDEST)
        assert not {*re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)} & REMOVED, path


def test_the_metadata_names_the_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [c.rpartition(" ")[2] for c in project["classifiers"] if c.startswith("Programming Language")]
    assert versions == ["3", *(f"3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1))]
    assert project["requires-python"] == f">=3.{OLDEST[1]}"
    assert OLDEST <= sys.version_info[:2] <= NEWEST


# -- the wheel


def _can_build() -> bool:
    try:
        major = int(metadata.version("setuptools").split(".")[0])
    except metadata.PackageNotFoundError:
        return False
    return major >= 77


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist of what git tracks, and of the wheel that was made from it. Needs no network."""
    if not _can_build():
        pytest.skip("needs setuptools of version 77 or newer")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    code = (
        "import logging, sys, zlib; make = zlib.compressobj; zlib.compressobj = lambda _, *more: make(1, *more)\n"
        "import setuptools.build_meta as backend; logging.disable(); getattr(backend, sys.argv[1])(sys.argv[2])"
    )  # packed quickly, in 4 s less
    for kind in ("sdist", "wheel"):
        run(sys.executable, "-c", code, f"build_{kind}", out, cwd=tree)
        if kind == "sdist":
            with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
                archive.extractall(unpacked := tmp_path_factory.mktemp("sdist"), filter="data")
            (tree,) = unpacked.iterdir()
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_has_one_name_and_nothing_unneeded(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    version = next(name for name in tops if name.endswith(".dist-info"))
    assert tops == {"logitless", version}
    allowed = {".py", ".typed", ".spv", ".json", ".gguf", ".html", ".css", ".js", ".woff2", ".txt"}
    others = [n for n in names if not n.startswith(version) and Path(n).suffix not in allowed]
    assert not others
    assert not [n for n in names if {"tests", "scripts", "docs"} & {*n.split("/")}]
    modules = {n for n in names if n.endswith(".py")}
    expected = {f"logitless/{p.relative_to(ROOT)}" for name in PACKAGES for p in (ROOT / name).rglob("*.py")}
    assert modules == expected | {str(path.relative_to(ROOT)) for path in (ROOT / "logitless").glob("*.py")}
    assert "logitless/server/ui/web/app.js" in names
    assert not [n for n in names if n.startswith("logitless/server/ui/src/")]
    shaders = [n for n in names if n.endswith(".spv")]
    assert shaders
    assert not [n for n in shaders if "/soft/" in n]  # for Vulkan on a CPU, a device for tests
    assert "logitless/py.typed" in names
    assert "logitless/models/demo/shakespeare.gguf" in names


def test_the_sdist_has_no_tests(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"logitless", "pyproject.toml", "README.md", "LICENSE"} <= tops
    assert not tops & {"tests", "scripts", "docs"}


def test_the_wheel_beside_a_distribution_with_our_old_names(wheel: Path, hostile: Path, tmp_path: Path) -> None:
    """Another distribution may have a top-level `models`; coming and going, it touches none of our files."""
    site = tmp_path / "site"
    shutil.copytree(hostile, site)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import logitless, sys; from logitless import LLM, SamplingParams, graph\n"
        "assert logitless.__file__.startswith(sys.argv[1]) and graph.__file__.startswith(sys.argv[1])\n"
        "with LLM(threads=1) as llm: print(llm.generate('ROMEO:', SamplingParams(max_tokens=2)).finish_reason)\n"
    )
    assert run(sys.executable, "-c", code, site, cwd=tmp_path, path=str(site)) == "length\n"
    for name in PACKAGES:
        shutil.rmtree(site / name)
    told = run(sys.executable, "-m", "logitless", "devices", cwd=tmp_path, path=str(site))
    assert told.startswith("cpu")


# -- metadata and dependencies


def test_the_metadata_has_authors_keywords_addresses_and_absolute_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(archive.read(name))
    assert message["Author"] == "The logitless authors"
    assert "gguf" in message["Keywords"].split(",")
    assert {url.split(", ")[0] for url in message.get_all("Project-URL")} == {
        "Repository",
        "Documentation",
        "Changelog",
    }
    assert message["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\(([^)]+)\)", message.get_payload(decode=True).decode())
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []


def test_a_failed_lazy_import_names_its_cause(tmp_path: Path) -> None:
    """A package that lacks a name, as an older version does."""
    (tmp_path / "aiohttp.py").write_text("def __getattr__(name): raise AttributeError(f'too old for {name}')\n")
    code = f"import sys; sys.path[0] = {str(tmp_path)!r}\nfrom logitless import serve"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "aiohttp" in done.stderr
    assert "cannot import name 'serve' from 'logitless'" not in done.stderr


def test_the_lowest_versions_serve(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--lowest"):
        pytest.skip("--lowest installs packages")
    python = tmp_path / "venv" / "bin" / "python"
    run("uv", "venv", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    run("uv", "pip", "install", "--python", python, "--resolution", "lowest-direct", ROOT, cwd=tmp_path)
    code = (
        "import json, urllib.request\n"
        "from logitless import LLM, serve\n"
        "with LLM(threads=1) as llm, serve(llm, port=0) as server:\n"
        "    body = json.dumps({'prompt': 'ROMEO:', 'max_tokens': 3}).encode()\n"
        "    request = urllib.request.Request(server.url + '/v1/completions', body)\n"
        "    request.add_header('Content-Type', 'application/json')\n"
        "    print(json.load(urllib.request.urlopen(request))['choices'][0]['finish_reason'])\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().endswith("length"), done.stderr
