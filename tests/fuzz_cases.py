"""Random changes of JSON and of bytes, for the tests of damaged files."""

import copy
import json
import random
from typing import Any

import leanbayes as lb


def nested(levels: int) -> Any:
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 1.5, -0.0, 1e308, 10**9, 10**18, -(10**18), 10**30, float("inf"), float("nan"), "",
    "x" * 3000, "a\nb", "\x1b[31m", "\ud800", "weight", "float8_e4m3fn", "zeros", "Ensemble", [], {}, [[]],
    [1], [[1], [2]], [None], {"type": "MeanField"}, {"type": ["a"]}, {"a": 1}, nested(20), nested(60), [0] * 100,
]  # fmt: skip


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return all places (container, key) in nested JSON values."""
    found: list[tuple[Any, Any]] = []
    containers = [value]
    while containers:
        one = containers.pop()
        for key, inner in [*(one.items() if isinstance(one, dict) else enumerate(one))]:
            found.append((one, key))
            if isinstance(inner, (dict, list)):
                containers.append(inner)
    return found


def changed_json(value: Any, choice: random.Random) -> Any:
    """Change one to three values in nested JSON values: other types, missing, repeated and wrapped values."""
    value = json.loads(json.dumps(value))
    for _ in range(choice.randint(1, 3)):
        places = places_in(value)
        if not places:
            break
        container, key = choice.choice(places)
        old, kind = container[key], choice.randrange(7)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, list):
            container[key:key] = [copy.deepcopy(old) for _ in range(choice.choice([1, 1, 50]))]
        elif kind == 2:
            container[key] = [old]
        elif kind == 3:
            other, name = choice.choice(places)
            with_other = other[name] if (name in other if isinstance(other, dict) else name < len(other)) else None
            container[key] = json.loads(json.dumps(with_other))
        elif kind == 4 and type(old) in (int, float):
            container[key] = choice.choice([old + 1, old - 1, -old, old * 1000, str(old)])
        elif kind == 5 and isinstance(container, dict):
            container[choice.choice(["", "type", "names", key + "x"])] = container.pop(key)
        else:
            container[key] = copy.deepcopy(choice.choice(VALUES))
    return value


def changed_text(text: str, choice: random.Random) -> str:
    """Change the text of a header: usually its values, sometimes also its characters, or a key twice."""
    value = json.loads(text)
    if choice.random() < 0.85:
        return json.dumps(changed_json(value, choice))
    if choice.random() < 0.5:
        return f'{text[:-1]}, "{choice.choice([*value])}": {json.dumps(choice.choice(VALUES))}}}'
    return changed_bytes(text.encode(), choice).decode("utf-8", "replace")


def changed_bytes(data: bytes, choice: random.Random) -> bytes:
    """Change bytes: flipped bits, other bytes, and ranges that are cut, repeated, removed or moved."""
    found = bytearray(data)
    for _ in range(choice.choice([1, 1, 1, 2, 5])):
        if not found:
            break
        place, length = choice.randrange(len(found)), choice.choice([1, 2, 4, 8, 100])
        kind = choice.randrange(7)
        if kind in (0, 1):
            found[place] ^= 1 << choice.randrange(8)
        elif kind == 2:
            found[place] = choice.choice([0, 255, choice.randrange(256)])
        elif kind == 3:
            del found[place:]
        elif kind == 4:
            found[place:place] = found[place : place + length]
        elif kind == 5:
            del found[place : place + length]
        else:
            found[place : place + length] = choice.randbytes(min(length, len(found) - place))
    return bytes(found)


def check_message(error: Exception) -> None:
    """Check that a damaged file is refused in one line."""
    text = str(error)
    assert text.isprintable()
    assert len(text) < 600
    assert type(error) is lb.FileFormatError
