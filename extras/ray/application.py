"""The Ray Serve application: deployments of the ingress and of each model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from logitless.engine.errors import Unavailable
from logitless.extras.ray.config import Autoscaling, FleetConfig, ModelConfig
from logitless.extras.ray.ingress import Ingress, ReplicaEnded
from logitless.extras.ray.prefixes import PrefixRoute
from logitless.extras.ray.replica import Replica
from logitless.server.asgi import ASGIApp, Message

_ROUTER = "logitless.extras.ray.prefix_router.PrefixRouter"
# Serve's own work shares the event loop of ours: a thread of its own costs two switches a message.
_ENVIRONMENT = {
    "env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
}
_DRAIN_SECONDS = 600.0  # that a replica which leaves has for its streams


def application(fleet: FleetConfig) -> serve.Application:
    """The application of a configuration, for `serve.run`."""
    models = {model.id: _deployment(model, fleet) for model in fleet.models}
    front = serve.deployment(serve.ingress()(_Front)).options(
        name="ingress",
        num_replicas=fleet.ingresses,
        max_ongoing_requests=1 << 14,
        ray_actor_options={"num_cpus": 0, "runtime_env": _ENVIRONMENT},
    )
    app: serve.Application = front.bind(fleet, models)
    return app


def _deployment(model: ModelConfig, fleet: FleetConfig) -> serve.Application:
    scales = model.replicas if isinstance(model.replicas, Autoscaling) else None
    options: dict[str, Any] = {"num_replicas": model.replicas}
    if scales is not None:
        options = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scales.min,
                max_replicas=scales.max,
                target_ongoing_requests=scales.target or model.n_slots,
                upscale_delay_s=scales.upscale_delay,
                downscale_delay_s=scales.downscale_delay,
            )
        }
    if (servers := model.rpc_servers) is not None:
        own = _bundle(model.num_cpus or 0.001, model.num_gpus)
        options["placement_group_bundles"] = [own] + [_bundle(servers.num_cpus, servers.num_gpus)] * servers.n
        options["placement_group_strategy"] = servers.strategy
    app: serve.Application = (
        serve.deployment(Replica)
        .options(
            name=model.id,
            max_ongoing_requests=model.limit,
            ray_actor_options={
                "num_cpus": model.num_cpus,
                "num_gpus": model.num_gpus,
                "runtime_env": _ENVIRONMENT,
            },
            graceful_shutdown_timeout_s=_DRAIN_SECONDS,
            graceful_shutdown_wait_loop_s=0.5,
            health_check_period_s=5,
            request_router_config=RequestRouterConfig(
                request_router_class=_ROUTER,
                request_router_kwargs={"slack": model.n_slots},
                request_routing_stats_period_s=2,
            ),
            **options,
        )
        .bind(model, fleet.data_dir)
    )
    return app


def _bundle(num_cpus: float, num_gpus: float) -> dict[str, float]:
    """Resources of a process in a placement group."""
    return {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})


class _Front:
    """Replica of the ingress. Serve makes its application when it starts."""

    def __init__(self, config: FleetConfig, models: Mapping[str, DeploymentHandle]) -> None:
        self._ingress = Ingress(config, {name: _Handle(handle) for name, handle in models.items()})

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def nothing() -> None:
            """The models start in their own replicas."""

        return ASGIApp(self._ingress.app(), nothing, nothing)


class _Handle:
    """Replicas behind a handle of Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._ask = handle.options(stream=True).exchange

    async def ask(self, scope: Message, body: bytes, route: PrefixRoute) -> AsyncGenerator[list[Message], None]:
        response = self._ask.remote(scope, body, route)
        ended = False
        try:
            async for messages in response:
                yield messages
            ended = True
        except RayActorError:
            raise ReplicaEnded from None
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise Unavailable(f"no replica takes the request: {type(error).__name__}") from None
        except asyncio.CancelledError:
            response.cancel()
            raise
        finally:
            if not ended:
                response.cancel()
