"""Loss history of a checkpoint: ours, of older versions, and ggml's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.models.errors import ModelFileError
from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import Key, flag, tensor, text, u32, u64, write_gguf
from logitless.training.checkpoint import read_checkpoint

PAST = "optimizer.adam.past_loss_values"
EXACT = "training.past_losses"


def history(path: Path, values: Any, n_steps: int, **more: Key) -> tuple[float, ...]:
    """Loss history of a checkpoint with these values, in a run with --opt-past 4."""
    keys = {
        "training.type": text("train_model"),
        "training.file_version": u32(0),
        **{f"training.{name}_count": u64(n_steps) for name in ("iteration", "sample", "token")},
        **{f"training.shuffle.{name}": u64(1) for name in ("samples_hash", "sample_count", "next_sample")},
        "training.shuffle.rng_state": text("state"),
        "optimizer.type": text("adam"),
        "optimizer.convergence_past_count": u32(4),
        "optimizer.iteration_count": u32(n_steps),
        "optimizer.just_initialized": flag(False),
        **{f"optimizer.adam.{name}_loss": Key(1.0, ValueType.FLOAT32) for name in ("best", "previous")},
        "optimizer.adam.no_improvement_count": u32(0),
        **{name.replace("__", "."): key for name, key in more.items()},
    }
    write_gguf(path / "c.gguf", "llama", keys, [(PAST, tensor(np.asarray(values, np.float32)))])
    result: tuple[float, ...] = read_checkpoint(path / "c.gguf").state["stopping"]["history"]
    return result


@pytest.mark.parametrize(
    ("values", "n_steps", "expected"),
    [
        ([4, 3, 2, 1], 4, [4, 3, 2, 1]),
        ([0.5, 3, 2, 1], 5, [3, 2, 1, 0.5]),
        ([2, 1, 4, 3], 10, [4, 3, 2, 1]),
        ([4, 3, 0, 0], 2, [4, 3]),
        ([0, 0, 0, 0], 0, []),
    ],
)
def test_ggml_keeps_losses_in_a_ring(tmp_path: Path, values: list[float], n_steps: int, expected: list[float]) -> None:
    """ggml_opt_adam: `pf[iteration % past] = fx`."""
    assert history(tmp_path, values, n_steps) == tuple(expected)


def test_older_versions_wrote_the_halves_of_doubles(tmp_path: Path) -> None:
    losses = [0.1, 0.2, 1 / 3]
    halves = np.array(losses).view(np.float32)
    assert history(tmp_path, halves, 3, training__settings=text("{}")) == tuple(losses)


def doubles(*values: float) -> Key:
    return Key(list(values), ValueType.ARRAY, ValueType.FLOAT64)


@pytest.mark.parametrize(
    ("values", "more", "told"),
    [
        (np.zeros((2, 2)), {}, rf"tensor '{PAST}' has shape \(2, 2\), expected \(4,\)"),
        (np.zeros(3), {}, rf"tensor '{PAST}' has shape \(3,\), expected \(4,\)"),
        (np.zeros(8), {}, rf"tensor '{PAST}' has shape \(8,\), expected \(4,\)"),
        (np.zeros(3), {"training__settings": text("{}")}, rf"tensor '{PAST}' has shape \(3,\), expected \(2·n,\)"),
        (np.zeros(3), {"training__past_losses": doubles(1, 2)}, rf"tensor '{PAST}' has shape \(3,\), expected \(2,\)"),
        (np.zeros(3), {"training__past_losses": text("1 2")}, f"key '{EXACT}' is not an array of doubles"),
        (
            np.zeros(1),
            {"training__past_losses": Key(["x"], ValueType.ARRAY, ValueType.STRING)},
            f"key '{EXACT}' is not an array of doubles",
        ),
    ],
)
def test_file_that_is_no_history_is_refused(tmp_path: Path, values: Any, more: dict[str, Key], told: str) -> None:
    with pytest.raises(ModelFileError, match=told):
        history(tmp_path, values, 9, **more)
