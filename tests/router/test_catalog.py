"""Router catalog: models of a folder and of a preset file, and errors of wrong ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from logitless.cli.commands.router import _flags, meaning
from logitless.cli.hub import cached
from logitless.models.synthetic.projector import PROJECTOR_SHAPES, synthesize_projector
from logitless.router.catalog import CatalogError, Sources, models_of_folder
from tests.helpers.hub_cache import HubCache
from tests.helpers.paths import MODELS
from tests.helpers.vision_files import N_TEXT, SPECS, write_projector

MEANING = partial(meaning, _flags(), ())


def test_a_folder_of_models(tmp_path: Path) -> None:
    files = ("one.gguf", "two/two.gguf", "two/mmproj-F16.gguf", "empty/readme.txt", "notes.txt", "mmproj-x.gguf")
    parts = [f"big/big-{i:05d}-of-00002.gguf" for i in (1, 2)]
    for name in (*files, *parts, "new\nline.gguf", "part-00002-of-00002.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nothing")
    result = {name: path.relative_to(tmp_path).as_posix() for name, path in models_of_folder(tmp_path).items()}
    assert result == {"one": "one.gguf", "two": "two/two.gguf", "big": parts[0]}
    with pytest.raises(CatalogError, match=r"--models-dir .*none: No such file or directory"):
        models_of_folder(tmp_path / "none")


def read(tmp_path: Path, text: str, *, files: tuple[str, ...] = (), common: tuple[str, ...] = ()) -> dict[str, object]:
    (tmp_path / "models").mkdir(exist_ok=True)
    for name in files:
        (tmp_path / "models" / name).touch()
    (tmp_path / "presets.ini").write_text(text)
    entries = Sources(tmp_path / "models", tmp_path / "presets.ini", common).read(MEANING)
    return {entry.name: entry for entry in entries}


def test_presets_of_the_three_kinds(tmp_path: Path) -> None:
    text = """version = 1
; for all
[*]
c = 8192
LLAMA_ARG_CACHE_RAM = 0
[a]
ctx_size = 100
no-slots = true
metrics = on
load-on-startup = true
[own]
m = /models/x.gguf
stop-timeout = 3
temp = 0.5   ; not a comment: only lines are
"""
    with pytest.raises(CatalogError, match=r"presets.ini: \[own\] --temp: '0.5   ; not a comment"):
        read(tmp_path, text, files=("a.gguf",))
    result = read(
        tmp_path,
        text.replace("   ; not a comment: only lines are", "") + "[u/r:Q8_0]\n",
        files=("a.gguf",),
        common=("-v",),
    )
    a = tmp_path / "models" / "a.gguf"
    every = ("-c", "8192", "--cache-ram", "0")
    own = ("--ctx-size", "100", "--no-slots", "--metrics")
    assert result["a"].args == (*every, *own, "--model", str(a), "--alias", "a", "-v")  # type: ignore[attr-defined]
    assert result["a"].load_on_startup  # type: ignore[attr-defined]
    assert result["own"].args == (*every, "-m", "/models/x.gguf", "--temp", "0.5", "--alias", "own", "-v")  # type: ignore[attr-defined]
    assert (result["own"].path, result["own"].stop_seconds) == ("/models/x.gguf", 3.0)  # type: ignore[attr-defined]
    assert result["u/r:Q8_0"].args == (*every, "--hf-repo", "u/r:Q8_0", "--alias", "u/r:Q8_0", "-v")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[a", "presets.ini: line 1: is no INI file"),
        ("[a]\nnonsense", "presets.ini: line 2: is no INI file"),
        ("[x]\nc = 1", r"\[x\] needs model = FILE, or hf-repo = USER/REPO"),
        ("[a]\nwidth = 3", r"\[a\] width: there is no such flag"),
        ("[a]\nc = many", r"\[a\] -c: 'many' is not a whole number"),
        ("[a]\nport = 1", r"\[a\] port: is the router's own"),
        ("[a]\napi-key = k", r"\[a\] api-key: is the router's own"),
        ("[a]\nhf-token = hf_verysecret", r"\[a\] hf-token: is a secret"),
        ("[a]\nmetrics = maybe", r"\[a\] metrics: 'maybe' is not true or false"),
        ("[a]\nload-on-startup = maybe", "load-on-startup: 'maybe' is not true or false"),
        ("[a]\ndedup-cache-models = maybe", r"\[a\] dedup-cache-models: 'maybe' is not true or false"),
        ("[*]\ndedup-cache-models = 2", r"\[\*\] dedup-cache-models: '2' is not true or false"),
        ("[a]\nstop-timeout = -1", "stop-timeout: is not a number"),
        ("[a]\nalias = c, b\n[b]\nm = x", r"\[a\] alias 'b': is the name of \[b\]"),
        ("[a]\nalias = x\n[b]\nm = x\nalias = y, x", r"\[b\] alias 'x': is the name of \[a\]"),
        ("[a]\nspec-replace = x", r"\[a\] not supported yet: --spec-replace"),
    ],
)
def test_wrong_presets_are_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(CatalogError, match=line) as caught:
        read(tmp_path, text, files=("a.gguf",))
    assert "\n" not in str(caught.value)
    assert "verysecret" not in str(caught.value)


def test_files_that_are_no_presets(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"none\.ini: No such file"):
        Sources(None, tmp_path / "none.ini", ()).read(MEANING)
    (tmp_path / "bad.ini").write_bytes(b"[a]\nm = \xff")
    with pytest.raises(CatalogError, match="byte 8 is not UTF-8"):
        Sources(None, tmp_path / "bad.ini", ()).read(MEANING)


def test_downloaded_models_come_last(tmp_path: Path) -> None:
    for name in ("u/r", "u/s:Q8_0"):
        (tmp_path / "presets.ini").write_text(f"[{name}]\nc = 1\n")
        result = {"u/r:Q4_0": (tmp_path / "x", "u/r"), "u/s:Q8_0": (tmp_path / "y", "u/s")}
        entries = {e.name: e for e in Sources(None, tmp_path / "presets.ini", (), result.copy).read(MEANING)}
        assert (entries[name].source, entries["u/r:Q4_0"].source) == ("preset", "cache")
        assert entries[name].args[-4:] == ("--hf-repo", name, "--alias", name)
        assert entries["u/r:Q4_0"].aliases == (() if name == "u/r" else ("u/r",))  # a name is never taken away
        assert entries["u/r:Q4_0"].args == ("--model", str(tmp_path / "x"), "--alias", "u/r:Q4_0")


def test_a_preset_hides_the_downloaded_models_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_cache: HubCache
) -> None:
    q8, q4, other = (hub_cache(*of) for of in (("u/r", "m-Q8_0.gguf"), ("u/r", "m-Q4_0.gguf"), ("u/d", "d-F16.gguf")))
    hub_cache("u/z", "z-F32.gguf")
    presets = tmp_path / "presets.ini"

    def listed(text: str) -> tuple[list[str], list[str]]:
        """(visible, hidden) downloaded models."""
        presets.write_text(text)
        entries = [e for e in Sources(None, presets, (), cached.models).read(MEANING) if e.source == "cache"]
        return [e.name for e in entries if not e.hidden], [e.name for e in entries if e.hidden]

    every = ["u/d:F16", "u/r:Q4_0", "u/r:Q8_0", "u/z:F32"]
    dedup = "dedup-cache-models = 1\n"
    assert listed("[a]\nhf-repo = u/r:q8_0\n") == (every, [])
    assert listed(f"[a]\nhf-repo = u/r:q8_0\n{dedup}") == (["u/d:F16", "u/r:Q4_0", "u/z:F32"], ["u/r:Q8_0"])
    both = f"[a]\nhf = u/r\nhff = m-Q8_0.gguf\nLLAMA_ARG_SPEC_DRAFT_HF_REPO = u/d\nspec-type = draft-simple\n{dedup}"
    assert listed(both) == (["u/r:Q4_0", "u/z:F32"], ["u/d:F16", "u/r:Q8_0"])
    assert listed(f"[*]\n{dedup}[a]\nm = {q4}\n[b]\nm = {other.resolve()}\n") == (
        ["u/r:Q8_0", "u/z:F32"],
        ["u/d:F16", "u/r:Q4_0"],
    )
    assert listed(f"[*]\n{dedup}[a]\nm = {q8}\ndedup-cache-models = off\n") == (every, [])
    assert listed(f"[u/z:F32]\n{dedup}") == (every[:3], [])  # it is the preset itself


def test_settings_of_all_sections_are_those_of_each(tmp_path: Path) -> None:
    text = "[*]\nload-on-startup = yes\nstop-timeout = 3\n[a]\nload-on-startup = no\n[b]\nstop-timeout = 4\nm = x\n"
    result = read(tmp_path, text, files=("a.gguf", "c.gguf"))
    told = {name: (e.load_on_startup, e.stop_seconds) for name, e in result.items()}  # type: ignore[attr-defined]
    assert told == {"a": (False, 3.0), "b": (True, 4.0), "c": (True, 3.0)}


def test_models_read_what_their_projectors_read(tmp_path: Path, hub_cache: HubCache) -> None:
    """Those in a hub cache and in a model's own folder by any name, those in the folder of all by theirs."""
    text = (MODELS / "stories260K.gguf").read_bytes()
    eye = write_projector(tmp_path / "eye", SPECS["mlp"]).read_bytes()
    wide = synthesized(tmp_path / "wide", 2 * N_TEXT)
    ear = synthesized(tmp_path / "ear", N_TEXT, "whisper")
    hub_cache("u/r", "sub/m-Q8_0.gguf", text)
    for name in ("mmproj-F16.gguf", "mmproj-F32.gguf"):
        hub_cache("u/r", name, eye)
    hub_cache("u/wide", "m-Q8_0.gguf", text)
    hub_cache("u/wide", "mmproj-F16.gguf", wide)
    files = {
        "eye/m.gguf": text,
        "eye/mmproj-of-any-name.gguf": eye,
        "broken/m.gguf": text,
        "broken/mmproj.gguf": eye[:1000],
        "sub/m.gguf": text,
        "sub/mmproj.gguf": wide,
        "ear/m.gguf": text,
        "ear/mmproj.gguf": ear,
        "text.gguf": text,
        "text-Q8_0.gguf": text,
        "other.gguf": text,
        "other.mmproj-f16.gguf": eye,
        "mmproj-F16.gguf": eye,
    }
    for name, content in files.items():
        (tmp_path / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / name).write_bytes(content)
    presets = tmp_path / "presets.ini"
    presets.write_text(
        "[p]\nm = x\nmm = y\n[q]\nhf = u/r\n[off]\nhf = u/r\nno-mmproj = 1\n[u/far]\nmmu = http://h/m.gguf\n"
    )

    def reads(*common: str) -> tuple[list[str], list[str]]:
        sources = Sources(tmp_path / "models", presets, common, cached.models)
        entries = sources.read(partial(meaning, _flags(), common))
        return [entry.name for entry in entries if entry.images], [entry.name for entry in entries if entry.audio]

    assert reads() == (["eye", "other", "p", "q", "u/far", "u/r:Q8_0"], ["ear"])
    assert reads("--no-mmproj") == (["p", "u/far"], [])


def synthesized(path: Path, n_embd: int, shape: str = "tiny") -> bytes:
    """A small projector for a text model of this width."""
    small = replace(PROJECTOR_SHAPES[shape], n_embd=32, n_layer=1, n_head=4, n_ff=64)
    synthesize_projector(path, n_embd, small)
    return path.read_bytes()
