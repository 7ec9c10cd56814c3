"""Values that TensorFlow 1 computed, in `tests/reference` or the directory FTRAIN_REFERENCE."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(os.environ.get("FTRAIN_REFERENCE") or Path(__file__).parent / "reference")


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{name}.json").read_text())["cases"]


def array(values: Any, dtype: str) -> np.ndarray:
    """Return a recorded tensor; the file has "nan" and "inf" as strings."""
    return np.array(values, dtype=float).astype(dtype)
