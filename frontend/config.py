"""Front end settings: the defaults of requests and the model's names, read by parsers and replies."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from logitless.engine.sampling.params import SamplingParams
from logitless.engine.speculation.settings import SpeculationParams
from logitless.models.huggingface.config import repository_name

BUILD_INFO = "b1-logitless"  # llama-server's clients expect "b", then a build number


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """Settings of the model's users; names follow llama-server's flags."""

    model_path: str = ""
    alias: str = ""  # "": the name of the model's file
    aliases: tuple[str, ...] = ()
    n_parallel: int = 4
    n_predict: int = -1  # of requests that do not say; -1: until the end
    n_keep: int = 0
    cache_prompt: bool = True
    n_cache_reuse: int = 0  # default of requests
    backend_sampling: bool = True
    special: bool = False  # show special tokens as text
    spm_infill: bool = False  # POST /infill: the suffix is first in the prompt
    reverse_prompts: tuple[str, ...] = ()
    ignore_eos: bool = False  # default of requests
    defaults: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    models_that_draft: tuple[str, ...] = ()  # kinds (logitless.engine.speculation.settings: MODELS)
    max_body: int = 64 << 20  # bytes
    allow_graders: tuple[str, ...] = ()  # kinds of graders that reach beyond the server: endpoint, python
    private_addresses: bool = False  # graders' endpoints may be on this machine and its networks
    grader_url: str = ""  # the OpenAI-compatible server whose models score_model graders may ask, too
    grader_key: str = ""  # its API key
    media_marker: str = ""  # stands for an image in a prompt; "": a random one
    audio_max_seconds: int = 600  # of the sounds of one request together
    sse_ping_interval: int = 30  # seconds of silence before a comment line keeps a stream alive; -1: never
    prefill_assistant: bool = True
    skip_chat_parsing: bool = False  # reasoning and tool calls stay in the text of all answers
    reasoning_format: str = "auto"
    reasoning_effort: str = ""  # of requests that do not say, a variable of the chat template
    reasoning_budget: int = -1  # tokens of reasoning before it is ended; -1: no limit
    reasoning_budget_message: str = ""  # comes before the end of reasoning where its budget ends it
    pooling: str = ""  # of embeddings; "": the model file's
    embd_normalize: int = 2  # default of requests
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    first_messages: tuple[dict[str, str], ...] = ()  # in front of every conversation; a system message is a default
    verbose: bool = False

    @property
    def model(self) -> str:
        """The name that responses carry: the first alias of the alphabet, as llama-server's, or the file's."""
        return min(self.aliases, default=self.alias) or model_name(self.model_path)

    @property
    def names(self) -> frozenset[str]:
        """The names by which clients may ask for the model: aliases, and its file's with and without folder."""
        return frozenset({self.model, *self.aliases}) | file_names(self.model_path)


@lru_cache(1024)  # asked for by each request
def model_name(path: str | Path) -> str:
    """A model's name by its file, without folder, ending and number of the part; or by its folder."""
    if os.path.isdir(path):
        return repository_name(Path(path))
    return re.sub(r"-\d{5}-of-\d{5}$", "", Path(path).stem)


@lru_cache(1024)
def file_names(path: str) -> frozenset[str]:
    """The names of a model's file, by which clients may ask for it: the model's, the file's, the path."""
    return frozenset({model_name(path), Path(path).stem, Path(path).name, path} - {""})
