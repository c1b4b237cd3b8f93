"""The model's file: a path, a repository of Hugging Face's hub, a URL, or the demo that is shipped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from logitless.engine.loading.open_model import demo_model
from logitless.engine.loading.options import OPTIONS, ModelOptions, OptionError


def find_model(model: str | Path | None, options: dict[str, Any]) -> tuple[Path, ModelOptions]:
    """The model's file, downloaded where need be, and its checked options. OptionError names one."""
    known = (*OPTIONS, *_SOURCES)
    for name in options:
        if name not in known:
            raise OptionError(f"--{name.replace('_', '-')}: there is no such option")
    source = {name: options.pop(name, default) for name, default in _SOURCES.items()}
    checked = ModelOptions(**options)
    if not any(source[name] for name in ("hf_repo", "hf_file", "model_url", "hf_repo_draft")):
        return (demo_model() if model is None else Path(model)), checked
    return _download(model, source, checked)


_SOURCES: dict[str, Any] = {
    "hf_repo": None,
    "hf_file": None,
    "hf_token": None,
    "hf_repo_draft": None,
    "model_url": None,
    "mmproj_url": None,
    "offline": False,
}


def _download(model: str | Path | None, source: dict[str, Any], checked: ModelOptions) -> tuple[Path, ModelOptions]:
    from dataclasses import replace

    from logitless.cli.flags.model_options import Repo, url
    from logitless.cli.hub import model_source
    from logitless.cli.setup.model import find_draft_model, find_projector

    for name, parse in (
        ("hf_repo", Repo.parse),
        ("hf_repo_draft", Repo.parse),
        ("model_url", url),
        ("mmproj_url", url),
    ):
        if source[name] is not None:
            try:
                source[name] = parse(source[name])
            except ValueError as error:
                raise OptionError(f"--{name.replace('_', '-')}: {source[name]!r} {error}") from None
    names = SimpleNamespace(
        **source,
        model=model and str(model),
        spec_type=checked.spec_type,
        model_draft=checked.model_draft,
        mmproj=checked.mmproj,
        mmproj_auto=checked.mmproj_auto,
    )
    path = model_source.find(names) or demo_model()
    find_draft_model(names, path)
    find_projector(names, path)
    return path, replace(checked, model_draft=names.model_draft, mmproj=names.mmproj, mmproj_auto=names.mmproj_auto)
