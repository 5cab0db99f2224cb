"""Read `prompt_items` of a request: vectors that replace some of a prompt's tokens.

    {"prompt": [1, 7, 7, 7, 2], "prompt_items": [{"offset": 1, "length": 3, "vectors": "<base64>", "is_embed": [true, true, false]}]}

`vectors` are little-endian float32, one after the other. `is_embed` says which tokens of the item have a vector; without
it, all have one.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from ...web.errors import ApiError, bad_request
from ..engine.types import PromptItem

_FIELD = "prompt_items"
_KEYS = frozenset({"offset", "length", "vectors", "is_embed"})


def parse_items(body: Mapping[str, Any]) -> tuple[PromptItem, ...]:
    """Read the items of a body. An absent field means no items.

    Raises:
        ApiError: a field is missing, unknown or of the wrong type, or the prompt is not a list of token ids (400).
    """
    value = body.get(_FIELD)
    if value is None or value == []:
        return ()
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise _wrong("needs a prompt that is a list of token ids, because its offsets count tokens")
    if not isinstance(value, list):
        raise _wrong("must be a list")
    return tuple(_item(f"[{index}]", item) for index, item in enumerate(value))


def _item(where: str, item: object) -> PromptItem:
    if not isinstance(item, dict) or not {"offset", "length", "vectors"} <= item.keys() <= _KEYS:
        raise _wrong(
            f"{where} must be an object with 'offset', 'length', 'vectors' and optionally 'is_embed'"
        )
    offset, length, is_embed = item["offset"], item["length"], item.get("is_embed") or []
    if type(offset) is not int or type(length) is not int:
        raise _wrong(f"{where}: 'offset' and 'length' must be integers")
    if not isinstance(is_embed, list) or not all(isinstance(flag, bool) for flag in is_embed):
        raise _wrong(f"{where}.is_embed must be a list of booleans")
    return PromptItem(offset, length, _bytes(where, item["vectors"]), tuple(is_embed))


def _bytes(where: str, text: object) -> bytes:
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except binascii.Error:
        pass
    raise _wrong(f"{where}.vectors must be a base64 string")


def _wrong(why: str) -> ApiError:
    separator = "" if why.startswith("[") else " "
    return bad_request(f"{_FIELD}{separator}{why}", _FIELD)
