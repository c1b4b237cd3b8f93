"""Paths of the repository and of the test data beside it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"  # models, vocabularies, expected outputs, corpora
MODELS = DATA / "models"
