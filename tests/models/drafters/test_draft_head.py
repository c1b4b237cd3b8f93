"""Draft head against float64: logits of drafts, gradients and updates of an optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.graph.ops.training.optimizer import adamw_params
from logitless.models.drafters.draft_head import MAX_NORM, PREFIX, DraftHead, HeadTraining, HeadValues, write_rows
from tests.helpers.reference_model import Spec, write

Array = np.ndarray[Any, np.dtype[np.float64]]
N, DEPTH, EPS = 4, 2, 1e-5
NAMES = ("norm_h", "norm_e", "keep", "down_h", "down_e", "up")


class Reference:
    """The head in float64, its gradients by hand."""

    def __init__(self, params: dict[str, Array], table: Array, rows: Array) -> None:
        self.p, self.table, self.rows = params, table, rows
        self.grads = {name: np.zeros_like(value) for name, value in params.items()}
        self.saved: list[tuple[Array, ...]] = []

    def forward(self, h: Array, tokens: list[int]) -> tuple[Array, Array]:
        p, e = self.p, self.table[tokens]
        h_unit, e_unit = (x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) for x in (h, e))
        a = (h_unit * p["norm_h"]) @ p["down_h"].T + (e_unit * p["norm_e"]) @ p["down_e"].T
        s = a / (1 + np.exp(-a))
        y = h * p["keep"] + s @ p["up"].T
        self.saved.append((h, h_unit, e_unit, a, s))
        return y, y @ self.rows.T

    def backward(self, dy: Array) -> Array:
        """Gradient of the last call's h, from that of its y."""
        p, g = self.p, self.grads
        h, h_unit, e_unit, a, s = self.saved.pop()
        part = 1 / (1 + np.exp(-a))
        g["keep"] += (dy * h).sum(0)
        g["up"] += dy.T @ s
        da = (dy @ p["up"]) * part * (1 + a * (1 - part))
        for name, unit in (("h", h_unit), ("e", e_unit)):
            g[f"down_{name}"] += da.T @ (unit * p[f"norm_{name}"])
            g[f"norm_{name}"] += ((da @ p[f"down_{name}"]) * unit).sum(0)
        dn = (da @ p["down_h"]) * p["norm_h"]
        scale = 1 / np.sqrt((h * h).mean(1, keepdims=True) + EPS)
        dx: Array = dy * p["keep"] + scale * (dn - h_unit * (dn * h_unit).mean(1, keepdims=True))
        return dx


@pytest.mark.parametrize(("untied", "dtype"), [(False, "f32"), (True, "q4_0")])
def test_head_draft_and_step_equal_float64(untied: bool, dtype: str, tmp_path: Path) -> None:
    tensors = write(path := tmp_path / "m.gguf", Spec(untied=untied, n_vocab=300, dtype=dtype))
    engine = ModelRunner(path, RunnerOptions(64, n_slots=1, n_ubatch=16, n_draft_tokens=DEPTH, learns=True))
    rng, session, values = np.random.default_rng(3), engine.session, engine.draft_head
    assert isinstance(values, HeadValues)
    assert isinstance(engine.graph.drafter, DraftHead)
    assert engine.graph.hidden is not None
    values.params["up"] = rng.normal(size=values.params["up"].shape).astype(np.float32)
    values.params["keep"] = rng.normal(size=values.params["keep"].shape).astype(np.float32)
    values.ids[:] = rng.permutation(300).tolist()
    write_rows(session, engine.model, list(enumerate(values.ids)))
    training, hidden = HeadTraining.define(session, values, engine.graph.drafter), engine.graph.hidden
    plan = session.plan(lambda: training.nodes(engine.model, hidden, N, DEPTH))
    h = rng.normal(size=hidden.shape).astype(np.float32)
    session.write("hidden", h)
    flat = h[:, 0].reshape(-1, h.shape[-1]).astype(np.float64)
    where, tokens = [5, 17, 30, 31], rng.integers(0, 300, (DEPTH, N))
    targets, weight = rng.integers(0, 300, (DEPTH, N)), rng.random((DEPTH, N)).astype(np.float32)
    feeds = {"learn.rows": where, "learn.tokens": tokens.reshape(-1), "learn.targets": targets.reshape(-1)}
    feeds = {name: np.array(value, np.int32) for name, value in feeds.items()}
    *best, norm = plan.run(
        {**feeds, "learn.weight": weight.reshape(-1), "learn.optimizer": adamw_params(1, 1e-2)},
        [None] * (DEPTH + 1) + [0] * len(NAMES),
    )[: DEPTH + 1]

    table, head = tensors["token_embd.weight"], tensors["output.weight" if untied else "token_embd.weight"]
    params = {name: values.params[name].astype(np.float64) for name in NAMES}
    reference, y, slopes = Reference(params, table, head[values.ids]), flat[where], []
    for k in range(DEPTH):
        y, logits = reference.forward(y, tokens[k].tolist())
        assert np.array_equal(best[k], logits.argmax(1))
        p = np.exp(logits - logits.max(1, keepdims=True))
        slope = p / p.sum(1, keepdims=True)
        slope[np.arange(N), targets[k]] -= 1
        slopes.append((slope * weight[k][:, None]) @ reference.rows)
    dy = np.zeros_like(y)
    for slope in reversed(slopes):
        dy = reference.backward(dy + slope)
    total = np.sqrt(sum((g * g).sum() for g in reference.grads.values()))
    assert float(norm) == pytest.approx(total, rel=1e-4)
    for name in NAMES:
        g = reference.grads[name] * min(1.0, MAX_NORM / total)
        m = session.read(f"{PREFIX}.{name}.training.m")
        assert np.abs(m / 0.1 - g).max() <= 1e-4 * np.abs(g).max()
        moved = session.read(f"{PREFIX}.{name}.training") - params[name]
        clear = np.abs(g) > 1e-3 * np.abs(g).max()  # the first step of AdamW has the gradient's sign only
        assert np.abs(moved + 1e-2 * np.sign(g))[clear].max() < 1e-5
        assert np.array_equal(session.read(f"{PREFIX}.{name}"), values.params[name]), "the head that drafts is another"
    engine.close()
