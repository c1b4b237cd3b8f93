"""Scores of a model whose numbers are NaN or infinite."""

from __future__ import annotations

import json

import numpy as np
from msgspec import UNSET

from logitless.frontend.replies.encoding import encode_json
from logitless.server.api.openai.embeddings import text_score
from logitless.training.data.tokenize_rows import Example
from logitless.training.score import Score


def test_infinite_score_is_null():
    example = Example(np.array([1, 2, 3], np.int32), np.array([False, True, True]))
    score = Score(np.array([-np.inf, np.nan], np.float32), float("nan"), 2, float("inf"))
    told = json.loads(encode_json(text_score(0, example, score)))
    assert told["token_logprobs"] == [None, None, None]
    assert (told["loss"], told["gradient_norm"], told["n_counted"]) == (None, None, 2)
    assert text_score(0, example, Score(np.zeros(2, np.float32), 0.0, 2)).gradient_norm is UNSET
