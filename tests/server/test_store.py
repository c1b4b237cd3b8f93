"""What the store keeps is what clients get to see, so it must be JSON."""

from __future__ import annotations

import math
from pathlib import Path

from server.http.context import encode_json
from server.store import Store


def test_numbers_that_are_not_finite_are_kept_as_null(tmp_path: Path):
    store = Store(tmp_path)
    metrics = {
        "step": 3,
        "train_loss": math.nan,
        "gradient_norm": math.inf,
        "learning_rate": 0.5,
        "all": [-math.inf, 1],
    }
    store.add_event("job", "Step 3: training loss=nan", type="metrics", step=3, data=metrics)
    store.add_checkpoint("job", 3, {"id": "c", "metrics": {"full_valid_loss": math.inf}})
    store.put("jobs", {"id": "job", "loss": math.nan})
    ((_, event),) = store.events("job")
    expected = {"step": 3, "train_loss": None, "gradient_norm": None, "learning_rate": 0.5, "all": [None, 1]}
    assert event["data"] == expected
    assert store.checkpoints("job") == [{"id": "c", "metrics": {"full_valid_loss": None}}]
    assert store.get("jobs", "job") == {"id": "job", "loss": None}
    assert "null" in encode_json(event)
    store.close()
