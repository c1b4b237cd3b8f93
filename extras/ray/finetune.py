"""`logitless ray finetune`: `logitless finetune` with its workers on a Ray cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import CliError, Flag, Group, UsageError
from logitless.cli.flags.options_training import FINETUNE
from logitless.engine.loading.values import not_empty, number

if TYPE_CHECKING:
    from logitless.training.parallel.coordinator import Transport

RAY_FINETUNE = (
    Group("Cluster", (
        Flag("--address", "the cluster, HOST:PORT; `local` begins one here", not_empty, "auto", "ADDRESS"),
        Flag("--num-gpus", "GPUs that each worker reserves, beside the cores of -t", number(0, 64), 0.0, "X"),
    )),
    *FINETUNE,
)  # fmt: skip


def run(options: SimpleNamespace) -> int:
    if options.workers < 2:
        raise UsageError("ray finetune: give --workers N, 2 or more: this process is the first of them")
    from logitless.cli.commands.training import finetune

    try:
        import ray

        from logitless.extras.ray.training import Actors, warn_of_room
    except ImportError as error:
        raise CliError(f"ray finetune: needs the extra `logitless[ray]` ({error})") from None
    try:
        ray.init(None if options.address == "local" else options.address, log_to_driver=options.verbose)
    except (ConnectionError, ValueError) as error:
        raise CliError(f"--address {options.address}: {str(error).splitlines()[0]}") from None

    def actors() -> Transport:
        warn_of_room(options.workers - 1, options.threads)
        return Actors(options.threads, options.num_gpus)

    try:
        return finetune.run(options, actors)
    finally:
        ray.shutdown()
