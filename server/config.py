"""Server settings: one frozen value, set by the command line, read by handlers and parsers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logitless.engine.sampling.params import SamplingParams
from logitless.engine.speculation.settings import SpeculationParams
from logitless.server.tools.settings import ToolSettings

if TYPE_CHECKING:
    from ssl import SSLContext

BUILD_INFO = "b1-logitless"  # llama-server's clients expect "b", then a build number


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of one server; names follow llama-server's flags."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free one; the log line shows which
    model_path: str = ""
    alias: str = ""  # "": the name of the model's file
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
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
    api_keys: tuple[str, ...] = ()
    api_key_file: str = ""  # more of them; read again when it changes
    cache_isolation: str = "auto"  # whether keys share no cached prefixes: "on", "off", "auto": with several keys
    cache_shared: tuple[str, ...] = ()  # names of cache salts that all keys share
    admin_api_key: str = ""  # required for changes of the server, where it is set
    api_prefix: str = ""
    tls: SSLContext | None = None  # the key and certificate of HTTPS
    tls_files: tuple[str, str] = ("", "")  # certificate and key of `tls`, which SIGHUP reads again
    reuse_port: bool = False
    behind_router: bool = False  # a router is the only client, and names the client of each request
    cors_origins: str = (
        ""  # "*": any; "localhost": this machine's names; a comma list; "": see logitless.server.origins
    )
    cors_methods: tuple[str, ...] = ("GET", "POST", "DELETE", "OPTIONS")
    cors_headers: tuple[str, ...] = ("*",)  # "*": those that a preflight asks for
    cors_credentials: bool = True
    allowed_hosts: tuple[str, ...] = ()  # more names of a server without keys, or "*": any
    timeout: float = 3600  # seconds to read a request or to wait for a client that does not read
    max_body: int = 64 << 20  # bytes
    tools: ToolSettings = field(default_factory=ToolSettings)  # that the server runs
    allow_graders: tuple[str, ...] = ()  # kinds of graders that reach beyond the server: endpoint, python
    allow_integrations: tuple[str, ...] = ()  # trackers that jobs may report to beside tensorboard
    private_addresses: bool = False  # graders' endpoints may be on this machine and its networks
    grader_url: str = ""  # the OpenAI-compatible server whose models score_model graders may ask, too
    grader_key: str = ""  # its API key
    media_urls: bool = False  # whether media at http(s) addresses are fetched
    media_path: str = ""  # the folder below which a request may name media by file://; "": none
    media_marker: str = ""  # stands for an image in a prompt; "": a random one
    audio_max_seconds: int = 600  # of the sounds of one request together
    sse_ping_interval: int = 30  # seconds of silence before a comment line keeps a stream alive; -1: never
    metrics: bool = False
    slots: bool = True
    slot_save_path: str = ""  # the folder of slot files; "": none are written or read
    props: bool = False  # whether POST /props is allowed
    ui: bool = True
    ui_settings: Mapping[str, Any] = field(default_factory=dict)  # defaults of pages, told by GET /props
    static: str = ""  # the folder of files that are served in the place of the page
    prefill_assistant: bool = True
    skip_chat_parsing: bool = False  # reasoning and tool calls stay in the text of all answers
    reasoning_format: str = "auto"
    reasoning_effort: str = ""  # of requests that do not say, a variable of the chat template
    reasoning_budget: int = -1  # tokens of reasoning before it is ended; -1: no limit
    reasoning_budget_message: str = ""  # comes before the end of reasoning where its budget ends it
    pooling: str = ""  # of embeddings; "": the model file's
    embeddings: bool = False  # prepared at start, and among the capabilities in listings
    embd_normalize: int = 2  # default of requests
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    first_messages: tuple[dict[str, str], ...] = ()  # in front of every conversation; a system message is a default
    log_prompts_dir: str = ""  # the folder of prompt files; "": prompts are written nowhere
    verbose: bool = False

    @property
    def model(self) -> str:
        """The name that responses carry: the first alias of the alphabet, as llama-server's, or the
        file's.
        """
        return min(self.aliases, default=self.alias) or model_name(self.model_path)

    @property
    def names(self) -> frozenset[str]:
        """The names by which clients may ask for the model: aliases, and its file's with and without folder."""
        return frozenset({self.model, *self.aliases}) | file_names(self.model_path)


@lru_cache(1024)  # asked for by each request
def model_name(path: str | Path) -> str:
    """A model's name by its file: without folder, ending and number of the part."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", Path(path).stem)


@lru_cache(1024)
def file_names(path: str) -> frozenset[str]:
    """The names of a model's file, by which clients may ask for it: the model's, the file's, the path."""
    return frozenset({model_name(path), Path(path).stem, Path(path).name, path} - {""})
