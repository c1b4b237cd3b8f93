"""Ray Serve: replicas of models behind one address, routed by the prefixes that their KV caches hold.

Needs the extra `ray`. Serve's own YAML files have it as `import_path: logitless.extras.ray:app`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

    from logitless.extras.ray.config import FleetConfig


def build_app(config: Mapping[str, Any] | FleetConfig) -> Application:
    """The application of a configuration, for `serve.run`. OptionError: which field is wrong.

    >>> from ray import serve  # doctest: +SKIP
    >>> serve.run(build_app({"models": [{"model": "m.gguf", "replicas": 2}]}))  # doctest: +SKIP"""
    from logitless.extras.ray.application import application
    from logitless.extras.ray.config import read_config

    return application(read_config(config))


app = build_app
