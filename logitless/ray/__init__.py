"""Ray Serve: replicas of models behind one address, routed by the prefixes that their KV caches hold.

Needs the extra `ray`. Serve's own YAML files have it as `import_path: logitless.ray:app`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from logitless.ray.config import Autoscaling, FleetConfig, ModelConfig

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["Autoscaling", "FleetConfig", "ModelConfig", "app", "build_app"]


def build_app(config: Mapping[str, Any] | FleetConfig) -> Application:
    """The application of a configuration, for `serve.run`. OptionError: which field is wrong.

    >>> from ray import serve  # doctest: +SKIP
    >>> serve.run(build_app({"models": [{"model": "m.gguf", "replicas": 2}]}))  # doctest: +SKIP
    """
    from logitless.ray.application import application
    from logitless.ray.config import read_config

    return application(read_config(config))


app = build_app
