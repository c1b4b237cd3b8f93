"""Rows of the commands for Ray clusters."""

from __future__ import annotations

from logitless.cli.command import Command

COMMANDS = (
    Command("ray deploy", "CONFIG.yaml [flags]", "Serve models from replicas on a Ray cluster.",
            "logitless.extras.ray.deploy", "logitless.extras.ray.deploy", words=("--config",)),
    Command("ray finetune", "-m FILE --file DATA (--lora-out FILE | -o FILE) --workers N [finetune's flags]",
            "Train a model further with workers on a Ray cluster.", "logitless.extras.ray.finetune",
            "logitless.extras.ray.finetune"),
)  # fmt: skip
