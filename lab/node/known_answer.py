"""An answer may begin at one node and go on at another one, because a decode node may be lost in the middle, or drains.

A key of ours in `kv_transfer_params` passes on what there is of the answer; connectors ignore it. A router sends
`{"token_ids": [...], "created": ..., "model": ...}` as `continues` to a decode node, whose answer is then that of a single node: its
stream begins after these tokens, and everything else counts and contains them. Without tokens the answer begins here. A node with
another digest refuses (503): it may have been restarted with another model since the router has asked. With `"move_as": NAME` the
router may have the answer moved: it sends `{"move": NAME}`, and the answer stops after its next token with the `finish_reason`
`"moved"` and the params of an offer of its cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...connector.p2p.params import CONTINUES, MOVE_AS
from ...web.errors import bad_request
from ...web.fields import Fields


@dataclass(frozen=True)
class KnownAnswer:
    """The beginning of an answer, as other nodes chose it.

    Attributes:
        token_ids: Empty: the answer begins here.
        created: Seconds since 1970, for all parts of the answer. None: it begins here.
        model: Digest of the nodes that chose it. Empty: the router does not say.
        move_as: The name by which the answer can be moved. Empty: it cannot be.
    """

    token_ids: tuple[int, ...]
    created: int | None
    model: str = ""
    move_as: str = ""


def take_known_answer(
    params: Mapping[str, Any] | None,
) -> tuple[Mapping[str, Any] | None, KnownAnswer | None]:
    """Take what is known of the answer out of `kv_transfer_params`.

    Returns:
        The other params, and what a decode node is given.

    Raises:
        ApiError: A value has the wrong type (400).
    """
    if params is None or CONTINUES not in params:
        return params, None
    others = {key: value for key, value in params.items() if key != CONTINUES}
    if (given := Fields(params).optional_mapping(CONTINUES)) is None:
        return others, None
    inner = Fields(given)
    token_ids = given.get("token_ids") or []
    if not isinstance(token_ids, list) or not all(type(each) is int for each in token_ids):
        raise bad_request("'continues.token_ids' must be a list of integers", "kv_transfer_params")
    created, model = inner.optional_integer("created"), inner.text("model", "")
    return others, KnownAnswer(tuple(token_ids), created, model, inner.text(MOVE_AS, ""))
