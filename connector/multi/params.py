"""`kv_transfer_params` of a node with several connectors: one section per connector, beside the first one's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...transports.checked import Refused, mapping
from ..p2p.params import RENDEZVOUS_SUPPORTED, TRACEPARENT, invalid_params, traceparent_of

if TYPE_CHECKING:
    from ..base import ConnectorRequest, SchedulerHalf

#: The key of the children's own params, by the child's name.
SECTIONS = "connectors"


class ChildRequest:
    """An engine's request as one child sees it, with that child's own params."""

    def __init__(self, request: ConnectorRequest, kv_transfer_params: Mapping[str, Any] | None) -> None:
        self._request = request
        self.kv_transfer_params = kv_transfer_params

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self._request.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self._request.num_computed_tokens

    @property
    def finish_reason(self) -> str | None:
        return self._request.finish_reason

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def join_params(of_children: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Join the params that children have for the consumer, by child; None if there are none.

    The first child's keys also appear at the top level, for a consumer that has only that connector. A rendezvous has one name,
    and every child would offer by it, so a node with several children does not say that it can do this.
    """
    if not of_children:
        return None
    sections = {
        name: {key: value for key, value in params.items() if key != RENDEZVOUS_SUPPORTED}
        for name, params in of_children.items()
    }
    return {**next(iter(sections.values())), SECTIONS: sections}


def split_params(
    params: Mapping[str, Any] | None, children: Mapping[str, SchedulerHalf]
) -> dict[str, Mapping[str, Any] | None]:
    """Return the part of a request's params that is for each child.

    A child with a section of its own gets that section. If no child has one, for example because the params come from a
    node with one connector, they go to each child that recognizes them. If no child does, they go to the first, so that
    its error is reported.

    Raises:
        InvalidTransferParamsError: `connectors` is not a mapping of mappings.
    """
    if not isinstance(params, Mapping):
        return dict.fromkeys(children, params)  # None, or malformed: then the child's parser raises
    sections = dict(_sections(params))
    if own := children.keys() & sections.keys():
        # A router that releases an offer writes this once, at the top level, for the sections of all children.
        wish: dict[str, Any] = (
            {"do_remote_prefill": False, "do_release": True} if params.get("do_release") is True else {}
        )
        if traceparent := traceparent_of(params):
            wish = {**wish, TRACEPARENT: traceparent}
        return {name: {**sections[name], **wish} if name in own else None for name in children}
    flat = {key: value for key, value in params.items() if key != SECTIONS}
    readers = [name for name, child in children.items() if child.recognizes_params(flat)]
    readers = readers or list(children)[:1]
    return {name: flat if name in readers else None for name in children}


def _sections(params: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    sections = params.get(SECTIONS) or {}
    try:
        for name, section in mapping(sections).items():
            yield str(name), mapping(section)
    except Refused as refused:
        raise invalid_params(refused.text(SECTIONS), SECTIONS, sections) from None
