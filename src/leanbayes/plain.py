"""Plain values as every reader of JSON takes them: it has no nan and no infinity, so both are written as null."""

import json
import math
from typing import Any


def json_text(values: Any) -> str:
    """Write values as JSON."""
    return json.dumps(without_nan(values), indent=1, allow_nan=False)


def without_nan(values: Any) -> Any:
    """Put None in the place of nan and infinity, however deep they lie."""
    if isinstance(values, dict):
        return {key: without_nan(one) for key, one in values.items()}
    if isinstance(values, (list, tuple)):
        return [without_nan(one) for one in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def with_nan(values: Any) -> Any:
    """Put nan in the place of None, in values of which each is a number, a text, or not defined."""
    if isinstance(values, dict):
        return {key: with_nan(one) for key, one in values.items()}
    if isinstance(values, list):
        return [with_nan(one) for one in values]
    return math.nan if values is None else values
