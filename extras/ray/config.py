"""Configuration of a Ray Serve application: its models, their replicas and their options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from logitless.errors import OptionError

SLOTS = 4  # of a replica that sets no `parallel`, as `logitless serve` has


class Autoscaling(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Number of replicas that follows the queue: as many as keep `target` requests at each."""

    min: int = 1
    max: int = 2
    target: float | None = None  # requests that wait or run at a replica; default: its slots
    upscale_delay: float = 10  # seconds that the queue is long before a replica is added
    downscale_delay: float = 120  # seconds that it is short before one is removed

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max or self.max < 1:
            raise ValueError("must have 0 <= min <= max and max >= 1")
        if (self.target is not None and self.target <= 0) or self.upscale_delay < 0 or self.downscale_delay < 0:
            raise ValueError("target must be above 0, and the delays at least 0")


class RpcServers(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """rpc-servers of each replica, for a model that is larger than a machine: Ray starts them with the
    replica, as one placement group."""

    n: int = 1
    device: str = "cpu"  # that each lends
    num_cpus: float = 1  # that each reserves, and its threads
    num_gpus: float = 0
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "SPREAD"  # STRICT_SPREAD: a node for each

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError("n must be at least 1")
        if self.num_cpus <= 0 or self.num_gpus < 0:
            raise ValueError("num_cpus must be above 0, and num_gpus at least 0")


class ModelConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A model and the replicas that serve it. `options` are those of `LLM`: `parallel`, `lora`, …"""

    model: str = ""  # the GGUF file; empty: `options` says where to download it, or the demo
    name: str = ""  # default: the file's stem
    replicas: int | Autoscaling = 1
    options: dict[str, Any] = {}
    num_cpus: float = 1  # cores that a replica reserves; also its threads unless `options` sets them
    num_gpus: float = 0
    rpc_servers: RpcServers | None = None
    share_rollouts: bool = True  # reinforcement jobs sample their answers at all replicas, not at one
    max_ongoing_requests: int | None = None  # at a replica, others wait outside; default: twice the slots

    def __post_init__(self) -> None:
        if isinstance(self.replicas, int) and self.replicas < 1:
            raise ValueError("replicas must be at least 1")
        if self.max_ongoing_requests is not None and self.max_ongoing_requests < 1:
            raise ValueError("max_ongoing_requests must be at least 1")
        if self.num_cpus < 0 or self.num_gpus < 0:
            raise ValueError("num_cpus and num_gpus must be at least 0")
        if self.rpc_servers is not None and "rpc" in self.options:
            raise ValueError("rpc_servers and the option rpc are two sources of devices: give one of them")

    @property
    def id(self) -> str:
        """The model's name in requests."""
        repo = str(self.options.get("hf_repo") or "").rsplit("/", 1)[-1]
        return self.name or Path(self.model).stem or repo or "demo"

    @property
    def n_slots(self) -> int:
        """Requests that a replica computes at once."""
        return int(self.options.get("parallel", SLOTS))

    @property
    def limit(self) -> int:
        """Requests at a replica, those that wait for a slot included."""
        return self.max_ongoing_requests or 2 * self.n_slots


class FleetConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A Ray Serve application of one or several models."""

    models: tuple[ModelConfig, ...]
    data_dir: str = ""  # folder of fine-tuning jobs that all replicas reach; empty: no fine-tuning
    ingresses: int = 1  # replicas of the HTTP front
    server: dict[str, Any] = {}  # settings of `asgi_app`: `api_keys`, `admin_api_key`, `api_prefix`, `max_body`, …

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models must not be empty")
        names = [model.id for model in self.models]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two models are called {double!r}: give one another name")
        if self.ingresses < 1:
            raise ValueError("ingresses must be at least 1")


def read_config(value: Mapping[str, Any] | FleetConfig) -> FleetConfig:
    """The configuration of a mapping, as a YAML file has it. OptionError: which field is wrong."""
    if isinstance(value, FleetConfig):
        return value
    try:
        return msgspec.convert(dict(value), FleetConfig)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        raise OptionError(f"{path.rstrip('`').lstrip('.') or 'config'}: {reason}") from None


def load_config(path: str | Path) -> FleetConfig:
    """The configuration of a YAML or JSON file. OptionError: the file, or which field is wrong."""
    import yaml

    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise OptionError(f"{path}: {reason}") from None
    except yaml.YAMLError as error:
        raise OptionError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise OptionError(f"{path}: must be a mapping with `models`")
    try:
        return read_config(value)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None
