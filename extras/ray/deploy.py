"""`logitless ray deploy`: replicas of models on a Ray cluster, behind one address."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from logitless.cli.flags.flags import CliError, Flag, Group
from logitless.cli.flags.options import GENERAL, VERBOSE
from logitless.engine.loading.values import address, file_name, not_empty, whole

RAY_DEPLOY = (
    Group("Deployment", (
        Flag("-c --config", "YAML or JSON file of the models, replicas and options", file_name, metavar="FILE"),
        Flag("--address", "the cluster, HOST:PORT; `local` begins one here", not_empty, "auto", "ADDRESS"),
        Flag("--name", "the application; others of the cluster stay", not_empty, "logitless", "NAME"),
        Flag("--route-prefix", "path below which it answers", not_empty, "/", "PATH"),
        Flag("-H --host", "address of the HTTP proxies if Serve does not run yet", address, "127.0.0.1", "ADDRESS"),
        Flag("-p --port", "port of the HTTP proxies if Serve does not run yet", whole(0, 65535), 8000),
        Flag("--blocking", "stay until Ctrl-C, and remove the application then"),
        VERBOSE, *GENERAL,
    )),
)  # fmt: skip


def run(options: SimpleNamespace) -> int:
    if not options.config:
        raise CliError("ray deploy: give the configuration, a YAML file")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise CliError(f"ray deploy: needs the extra `logitless[ray]` ({error})") from None
    from logitless.errors import OptionError
    from logitless.extras.ray import build_app
    from logitless.extras.ray.config import load_config

    try:
        app = build_app(load_config(options.config))
    except OptionError as error:
        raise CliError(str(error)) from None
    try:
        ray.init(None if options.address == "local" else options.address, log_to_driver=options.verbose)
    except (ConnectionError, ValueError) as error:
        raise CliError(f"--address {options.address}: {str(error).splitlines()[0]}") from None
    serve.start(http_options={"host": options.host, "port": options.port})
    try:
        serve.run(app, name=options.name, route_prefix=options.route_prefix)
        print(f"{options.name} is served below {options.route_prefix} of the cluster's HTTP proxies", flush=True)
        if options.blocking or options.address == "local":
            threading.Event().wait()
    except RuntimeError as error:
        raise CliError(f"{options.name}: {' '.join(str(error).split())[:500]}") from None
    except KeyboardInterrupt:
        serve.delete(options.name)
    return 0
