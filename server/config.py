"""Server settings: one frozen value, set by the command line, read by handlers and parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from logitless.frontend.config import FrontendConfig

if TYPE_CHECKING:
    from ssl import SSLContext

    from logitless.server.server_tools import ServerTools


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(FrontendConfig):
    """Settings of one server, beside those of its front end; names follow llama-server's flags."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free one; the log line shows which
    tags: tuple[str, ...] = ()
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
    tools: ServerTools | None = None  # that the server runs
    allow_integrations: tuple[str, ...] = ()  # trackers that jobs may report to beside tensorboard
    media_urls: bool = False  # whether media at http(s) addresses are fetched
    media_path: str = ""  # the folder below which a request may name media by file://; "": none
    metrics: bool = False
    slots: bool = True
    slot_save_path: str = ""  # the folder of slot files; "": none are written or read
    props: bool = False  # whether POST /props is allowed
    ui: bool = True
    ui_settings: Mapping[str, Any] = field(default_factory=dict)  # defaults of pages, told by GET /props
    static: str = ""  # the folder of files that are served in the place of the page
    embeddings: bool = False  # prepared at start, and among the capabilities in listings
    log_prompts_dir: str = ""  # the folder of prompt files; "": prompts are written nowhere
