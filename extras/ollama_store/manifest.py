"""Created models on disk: a folder of --models-dir each, with a manifest beside its GGUF files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msgspec import Struct, ValidationError
from msgspec.json import decode
from msgspec.structs import replace as replace_struct

from logitless.frontend.answers import UNSET
from logitless.frontend.answers.ollama import OllamaMessage, ShownModel

log = logging.getLogger("logitless.router")
MANIFEST, MODEL, PROJECTOR = "created.json", "model.gguf", "mmproj.gguf"
TEMPLATE, MESSAGES, ADAPTER = "template.jinja", "messages.json", "adapter-{}.lora"
BLOBS = ".blobs"  # the folder of uploads, and of models that are not complete
MAX_BYTES = 64 << 20  # of a manifest
FLAGS = {  # of the parameters
    "num_ctx": "--kv-unified-per-slot",
    "num_predict": "--predict",
    "num_keep": "--keep",
    "seed": "--seed",
    "stop": "--reverse-prompt",
    "temperature": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "typical_p": "--typical",
    "repeat_last_n": "--repeat-last-n",
    "repeat_penalty": "--repeat-penalty",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "mirostat": "--mirostat",
    "mirostat_tau": "--mirostat-ent",
    "mirostat_eta": "--mirostat-lr",
}


class Manifest(Struct, frozen=True, kw_only=True):
    """The settings of a created model, as its client gave them. `created`: Unix time; `base`: the model
    that it was made from, "" for uploaded files; `model`: the name of its first GGUF file."""

    name: str
    created: float
    model: str = MODEL
    base: str = ""
    system: str = ""
    template: str = ""
    parameters: dict[str, Any] = {}
    messages: list[dict[str, str]] = []
    licenses: list[str] = []
    adapters: list[str] = []

    @property
    def folder(self) -> str:
        """The name of the model's folder."""
        return quote(self.name, safe="")

    def words(self, folder: Path) -> tuple[str, ...]:
        """The arguments of the model's server."""
        words = [f"--lora={folder / name}" for name in self.adapters]
        words += [f"--chat-template-file={folder / TEMPLATE}"] if self.template else []
        words += [f"--first-messages={folder / MESSAGES}"] if self.first_messages else []
        for name, value in self.parameters.items():
            for item in value if isinstance(value, list) else [value]:
                text = item.replace("\\", "\\\\") if isinstance(item, str) else item  # the flag reads escapes
                words.append(f"{FLAGS[name]}={text}")
        return tuple(words)

    @property
    def first_messages(self) -> list[dict[str, str]]:
        """The messages in front of every conversation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def as_modelfile(self) -> str:
        """The Modelfile that says the same."""
        lines = [f"FROM {self.base or self.model}", *(f"ADAPTER {name}" for name in self.adapters)]
        lines += [f"TEMPLATE {_quoted(self.template)}"] if self.template else []
        lines += [f"SYSTEM {_quoted(self.system)}"] if self.system else []
        lines += [f"PARAMETER {name} {value}" for name, value in self._shown_parameters()]
        lines += [f"MESSAGE {message['role']} {_quoted(message['content'])}" for message in self.messages]
        lines += [f"LICENSE {_quoted(text)}" for text in self.licenses]
        return "\n".join(lines) + "\n"

    def shown_in(self, answer: ShownModel) -> ShownModel:
        """The answer of /api/show with these settings."""
        return replace_struct(
            answer,
            modelfile=self.as_modelfile(),
            parameters=self.shown_parameters(),
            system=self.system or UNSET,
            messages=[OllamaMessage(m["content"], role=m["role"]) for m in self.messages] or UNSET,
            license="\n".join(self.licenses) or answer.license,
        )

    def shown_parameters(self) -> str:
        """The parameters, one a line."""
        return "\n".join(f"{name:<30} {value}" for name, value in self._shown_parameters())

    def _shown_parameters(self) -> Iterator[tuple[str, str]]:
        for name, value in self.parameters.items():
            for item in value if isinstance(value, list) else [value]:
                yield name, f'"{item}"' if isinstance(item, str) else f"{item:g}" if type(item) is float else str(item)


def created_models(folder: Path) -> dict[str, tuple[Path, Manifest]]:
    """(first GGUF file, manifest) by name of the folder's created models. A folder without its files, and
    links, do not count."""
    result: dict[str, tuple[Path, Manifest]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        manifest = read_manifest(path)
        if manifest is not None:
            model = path / manifest.model
            if manifest.folder == path.name and model.name == manifest.model and model.is_file():
                result[manifest.name] = model, manifest
            else:
                log.warning("%s: is ignored: it does not belong to the model of its manifest", path)
    return result


def has_manifest(folder: Path) -> bool:
    """True for the folder of a created model."""
    return not folder.is_symlink() and (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a created model's folder; None: there is none that can be read."""
    if not has_manifest(folder):
        return None
    try:
        with (folder / MANIFEST).open("rb") as file:
            manifest = decode(file.read(MAX_BYTES), type=Manifest)
        plain = all(Path(name).name == name for name in (manifest.model, *manifest.adapters))
        if plain and set(manifest.parameters) <= set(FLAGS):
            return manifest
        reason = "it names other files or unknown parameters"
    except (OSError, ValidationError, ValueError) as error:
        reason = " ".join(str(error).split())
    log.warning("%s: is ignored: %s: %s", folder, MANIFEST, reason)
    return None


def _quoted(text: str) -> str:
    return f'"""{text}"""' if '"' in text or "\n" in text else f'"{text}"'
