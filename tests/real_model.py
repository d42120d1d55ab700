"""The one real model of the tests: SmolLM2-135M-Instruct, which scripts/fetch_model.py puts under models/."""

from pathlib import Path

import pytest

REAL_MODEL = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def needs_real_model(test: object) -> object:
    """Decorator: marks a test `model`, and skips it where the file is absent."""
    absent = pytest.mark.skipif(not REAL_MODEL.exists(), reason=f"no {REAL_MODEL}: run scripts/fetch_model.py")
    return pytest.mark.model(absent(test))
