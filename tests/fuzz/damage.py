"""Valid bytes and JSON, damaged: cut, flipped, overwritten, of absurd sizes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

EDGES = (0, 1, 7, 63, 64, *(2**n - 1 for n in (31, 32, 63, 64)), 2**31, 2**48, 2**63)
edges = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**64 - 1))

# JSON values in place of a number, a name or a list.
RAW = (
    "null", "true", "-1", "0", "1", "2.5", "-0.0", "1e308", "1e999", "-1e999", "NaN",
    "Infinity", "9007199254740993", "9223372036854775808", "18446744073709551616",
    "9" * 400, "9" * 4300, "9" * 5000, '""', '"x"', '"\\u0000"', '"a\\u0000b"',
    '"\\ud800"', '"\\udc80"', '"../../x"', '".."', '"/"', '"' + "x" * 5000 + '"',
    '"²²²²²²²²²²²²-1.safetensors"', '"*"', "[]", "{}", "[[]]", "[1,2]", "[-1,5]",
    "[0,1e30]", '{"a":1}', "[" * 100_000, "[" * 900 + "]" * 900,
    "[" * 50_000 + "]" * 50_000, '{"a":' * 5000 + "1" + "}" * 5000,
)  # fmt: skip
_HOLE = "@hole-{}@"


@st.composite
def damaged(draw: st.DrawFn, valid: Sequence[bytes]) -> bytes:
    """Return valid bytes with up to four damages, or random bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(("cut", "flip", "word", "run", "insert", "grow"))):
            case "cut":
                del data[at:]
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "word":
                value = draw(edges).to_bytes(8, "little")[: draw(st.integers(1, 8))]
                data[at : at + len(value)] = value
            case "run":
                data[at : at + draw(st.integers(1, 64))] = draw(st.binary(max_size=64))
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
            case "grow":
                data += bytes(draw(st.integers(0, 4096)))
    return bytes(data)


@st.composite
def damaged_json(draw: st.DrawFn, valid: Sequence[Any]) -> bytes:
    """Return JSON of one of these values with up to three parts replaced or gone."""
    value: Any = copy.deepcopy(draw(st.sampled_from(valid)))
    holes: list[str] = []
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(value))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        what = draw(st.sampled_from(("raw", "raw", "number", "drop", "rename")))
        if what == "drop":
            del holder[key]
        elif what == "rename" and isinstance(holder, dict):
            holder[draw(st.text(max_size=4))] = holder.pop(key)
        else:
            raw = str(draw(edges)) if what == "number" else draw(st.sampled_from(RAW))
            holder[key] = _HOLE.format(len(holes))
            holes.append(raw)
    text = json.dumps(value)
    for number, raw in enumerate(holes):
        text = text.replace(f'"{_HOLE.format(number)}"', raw)
    return text.encode("utf-8", "surrogatepass")


def json_or_bytes(*valid: Any) -> st.SearchStrategy[bytes]:
    """Return damaged JSON, or JSON damaged as bytes."""
    texts = [json.dumps(value).encode() for value in valid]
    return st.one_of(damaged_json(valid), damaged_json(valid), damaged(texts))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return every (container, key) of a JSON value."""
    pairs = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)
