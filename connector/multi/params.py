"""`kv_transfer_params` of a node with several connectors: one section for each beside what others understand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidTransferParamsError

if TYPE_CHECKING:
    from ..base import ConnectorRequest, KVConnectorBase

#: Where each child's own params stand, by the child's name.
SECTIONS = "connectors"


class ChildRequest:
    """An engine's request as one child sees it: with the params that are for this child."""

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
    """Make one answer of what the children say to the consumer, by child; None if they say nothing.

    The first child's keys also stand at the top, for a consumer with that connector alone.
    """
    if not of_children:
        return None
    first = next(iter(of_children.values()))
    return {**first, SECTIONS: {name: dict(params) for name, params in of_children.items()}}


def split_params(
    params: Mapping[str, Any] | None, children: Mapping[str, KVConnectorBase]
) -> dict[str, Mapping[str, Any] | None]:
    """Find out what each child is told of a request's params.

    Its own section, if there is one. Params without a section for any child, such as those of a node with one
    connector, go to each child that recognizes them; to the first one if none does, so that the failure is seen.

    Raises:
        InvalidTransferParamsError: `connectors` is no mapping of mappings.
    """
    if not isinstance(params, Mapping):
        return dict.fromkeys(children, params)  # None, or malformed: each child's parser says so
    sections = dict(_sections(params))
    if own := children.keys() & sections.keys():
        # A router that releases an offer says so once, for the sections of all children.
        wish = {"do_remote_prefill": False, "do_release": True} if params.get("do_release") is True else {}
        return {name: {**sections[name], **wish} if name in own else None for name in children}
    flat = {key: value for key, value in params.items() if key != SECTIONS}
    readers = [name for name, child in children.items() if child.recognizes_params(flat)]
    readers = readers or list(children)[:1]
    return {name: flat if name in readers else None for name in children}


def _sections(params: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    sections = params.get(SECTIONS) or {}
    if not isinstance(sections, Mapping):
        raise _error(sections)
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise _error(section)
        yield str(name), section


def _error(value: object) -> InvalidTransferParamsError:
    kind = type(value).__name__
    return InvalidTransferParamsError(
        f"kv_transfer_params: {SECTIONS} must map connectors to objects, but there is a {kind}",
        key=SECTIONS,
        value=kind,
    )
