"""Models of Docker's hub (--docker-repo): a registry whose manifests name a GGUF file as a layer."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from logitless.cli.flags.flags import CliError
from logitless.cli.flags.model_options import DockerModel
from logitless.cli.hub.download import ProgressOf, Unreachable, fetch

REGISTRY, TOKENS, SERVICE = "https://registry-1.docker.io", "https://auth.docker.io/token", "registry.docker.io"
_MANIFESTS = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
_GGUF = re.compile(r"application/vnd\.docker\.ai\.gguf(\.|\+|$)")  # a layer's type, without projectors
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TIMEOUT = 30.0


def find(model: DockerModel, folder: Path, *, offline: bool = False, progress: ProgressOf | None = None) -> Path:
    """The model's file below `folder`, downloaded if it is not there or has changed. CliError: it cannot be had."""
    place = folder / "docker" / model.repo.replace("/", "--")
    note = place / f"{model.tag}.json"
    if offline:
        return _earlier(place, note) or _absent(f"--offline: {model} has never been downloaded")
    try:
        headers = {"Authorization": f"Bearer {_token(model)}"}
        layer = _layer(model, _json(f"/v2/{model.repo}/manifests/{model.tag}", model, Accept=_MANIFESTS, **headers))
    except Unreachable:
        if (path := _earlier(place, note)) is not None:
            return path
        raise
    digest, size = layer
    path = place / f"{digest.removeprefix('sha256:')[:16]}.gguf"
    if not path.exists():
        blob, sha256 = f"{REGISTRY}/v2/{model.repo}/blobs/{digest}", digest.removeprefix("sha256:")
        fetch(blob, path, name=str(model), headers=headers, version=digest, size=size, sha256=sha256, progress=progress)
    note.write_text(json.dumps({"file": path.name}))
    return path


def _token(model: DockerModel) -> str:
    query = urlencode({"service": SERVICE, "scope": f"repository:{model.repo}:pull"})
    return str(_json(f"{TOKENS}?{query}", model).get("token", ""))


def _layer(model: DockerModel, manifest: dict[str, Any]) -> tuple[str, int | None]:
    """(digest, bytes) of the layer that is a GGUF file."""
    for layer in manifest.get("layers") or ():
        kind, digest, size = (layer.get(key) for key in ("mediaType", "digest", "size"))
        if isinstance(kind, str) and _GGUF.match(kind) and isinstance(digest, str) and _DIGEST.fullmatch(digest):
            return digest, size if isinstance(size, int) else None
    raise CliError(f"--docker-repo: {model}: has no GGUF file")


def _json(address: str, model: DockerModel, **headers: str) -> dict[str, Any]:
    url = address if address.startswith(TOKENS) else REGISTRY + address
    request = urllib.request.Request(url, headers={"User-Agent": "logitless", **headers})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
            answer = json.loads(reply.read(1 << 22))
    except urllib.error.HTTPError as error:
        error.close()
        reason = "there is no such model" if error.code in (401, 404) else f"{error.code} {error.reason}"
        raise CliError(f"--docker-repo: {model}: Docker's hub answers: {reason}") from None
    except (urllib.error.URLError, OSError) as error:
        reason = str(getattr(error, "reason", "") or error)
        raise Unreachable(f"--docker-repo: {model}: Docker's hub cannot be reached: {reason}") from None
    except ValueError:
        raise CliError(f"--docker-repo: {model}: Docker's hub answers something else than JSON") from None
    return answer if isinstance(answer, dict) else {}


def _earlier(place: Path, note: Path) -> Path | None:
    """The file of an earlier download of this tag."""
    try:
        path = place / Path(str(json.loads(note.read_text())["file"])).name
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if path.is_file() else None


def _absent(reason: str) -> Path:
    raise CliError(reason)
