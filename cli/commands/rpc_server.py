"""`logitless rpc-server`: lend a device of this machine to servers on others (`--rpc`)."""

from __future__ import annotations

import logging
import socket
from types import SimpleNamespace

from logitless.cli.flags.flags import CliError, Flag, Group
from logitless.cli.flags.options import GENERAL, SERVING, THREADS
from logitless.cli.setup.model import choose_device
from logitless.cli.setup.server import api_key_file, tls_context
from logitless.engine.loading.values import address, devices_or_auto, whole

log = logging.getLogger("logitless.rpc")
_DOOR = frozenset({"api_key", "api_key_file", "ssl_key_file", "ssl_cert_file"})  # the HTTP server's flags

RPC_SERVER = (
    Group("RPC server", (
        Flag("-H --host", "address to listen on; every client that connects can use the device, unless there are keys",
             address, "127.0.0.1", "ADDRESS"),
        Flag("-p --port", "port to listen on; 0: any free one", whole(0, 65535), 50052),
        Flag("--device -dev -d", "the device to lend, as for `serve`", devices_or_auto, "auto", "NAME"),
        THREADS, *(flag for flag in SERVING.flags if flag.dest in _DOOR), *GENERAL,
    )),
)  # fmt: skip


def run(options: SimpleNamespace) -> int:
    from logitless.backends.host_memory import total_memory
    from logitless.backends.rpc.server import Door, lent_device, listen
    from logitless.server.auth import ApiKeys

    choose_device(options, most=1)
    name = options.device
    if "," in name or name.startswith("rpc:"):
        raise CliError(f"--device {name}: one device of this machine")

    keys = ApiKeys(options.api_key, api_key_file(options.api_key_file))
    door = Door(lambda key: not keys or keys.match(key), tls_context(options))
    open_backend, budget = lent_device(name, max(options.threads, 0), total_memory())
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log.setLevel(logging.INFO)
    try:
        sock = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]  # create_server adds the address
        raise CliError(f"cannot listen on {options.host}:{options.port}: {reason}") from None
    with sock:
        log.info("listening on %s:%d, lending %s", options.host, sock.getsockname()[1], name)
        listen(sock, open_backend, budget, door)
    return 0
