"""Which of several usable nodes gets a request. Pure: no clock, no socket.

`least-loaded` is the default. The router cannot know whether its prompts share prefixes. If they do not,
`prefix` only loses: of two concurrent prompts one may wait for the other while a second node is idle.
`docs/router.md` says when to choose `prefix`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from .ring import Ring, choose

PolicyName = Literal["least-loaded", "prefix"]
DEFAULT_PREFIX_LENGTH = 256
#: A node's share of the requests, as a multiple of the mean. Smaller ones move prompts away from their cache
#: more often, larger ones let requests wait while another node is idle.
LOAD_FACTOR = 1.25
#: The usual mean for English text.
CHARS_PER_TOKEN = 4
#: Deeper values do not count: `messages[0]["content"][0]["image_url"]["url"]` has depth 6.
MAX_DEPTH = 8


class Candidate(Protocol):
    """A node that can take a request."""

    url: str
    in_flight: int
    num_others: int
    last_used: int


C = TypeVar("C", bound=Candidate)


class Policy(ABC):
    """Chooses between nodes that are equally well."""

    @abstractmethod
    def choose(self, candidates: Sequence[C], body: Mapping[str, Any]) -> C:
        """Return the node for a request with this body. There is at least one candidate."""

    @abstractmethod
    def nodes_changed(self, urls: Collection[str]) -> None:
        """Learn which nodes the role has. They include all later candidates."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Return the policy and what it has counted, as JSON."""


class LeastLoaded(Policy):
    """Chooses the node with the fewest requests. Equal nodes are taken round-robin.

    If other routers use the nodes too, it compares only the two nodes that this router has used least
    recently. The requests of other routers are known from the last check only: if each router took the best
    of all nodes, all of them would take the same node until the next check.
    """

    def choose(self, candidates: Sequence[C], body: Mapping[str, Any]) -> C:
        if any(node.num_others for node in candidates):
            candidates = sorted(candidates, key=lambda node: node.last_used)[:2]
        return min(candidates, key=lambda node: (node.in_flight + node.num_others, node.last_used))

    def nodes_changed(self, urls: Collection[str]) -> None:
        return

    def report(self) -> dict[str, Any]:
        return {"name": "least-loaded"}


class PrefixAffinity(Policy):
    """Sends prompts with the same prefix to the same node, as long as it has at most its share of the
    requests.

    Args:
        length: Characters of the prompt that decide.

    Raises:
        ValueError: The length is out of range.
    """

    def __init__(self, *, length: int = DEFAULT_PREFIX_LENGTH) -> None:
        if length < 1:
            raise ValueError(f"--prefix-length {length}: it must be at least 1 character")
        self._length = length
        self._ring = Ring(())
        self._num_first = 0
        self._num_later = 0

    def nodes_changed(self, urls: Collection[str]) -> None:
        self._ring = Ring(urls)

    def choose(self, candidates: Sequence[C], body: Mapping[str, Any]) -> C:
        usable = {node.url: node for node in candidates}
        loads = {url: node.in_flight + node.num_others for url, node in usable.items()}
        key = prefix_key(body, self._length)
        chosen = choose(self._ring, key, loads, LOAD_FACTOR)
        if chosen == next(self._ring.walk(key)):
            self._num_first += 1
        else:
            self._num_later += 1
        return usable[chosen]

    def report(self) -> dict[str, Any]:
        return {
            "name": "prefix",
            "prefix_length": self._length,
            "load_factor": LOAD_FACTOR,
            "num_at_first_node": self._num_first,
            "num_at_later_node": self._num_later,
        }


def prefix_key(body: Mapping[str, Any], length: int) -> bytes:
    """Return what requests must share for one node to be the best for both: model, cache salt, and the
    prompt's beginning.

    Args:
        body: A completion or chat request. Malformed fields are no error here; the node will refuse them.
        length: Characters of the prompt. Of a prompt of token ids, a quarter as many tokens.
    """
    # An adapter or a salt changes the keys of the prefix cache, so equal prompts share nothing.
    names = (str(body.get(name) or "") for name in ("model", "cache_salt"))
    return "\0".join((*names, _beginning(body, length))).encode(errors="surrogatepass")


def _beginning(body: Mapping[str, Any], length: int) -> str:
    prompt = body.get("prompt", body.get("prompt_embeds"))
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a list with one prompt
    if isinstance(prompt, list):
        return " ".join(map(str, prompt[: max(1, length // CHARS_PER_TOKEN)]))
    # Most chat templates write the tools before the messages.
    pieces = texts_in([prompt, body.get("tools"), body.get("messages")], MAX_DEPTH)
    # Character by character, so that no long text is copied.
    return "".join(itertools.islice(itertools.chain.from_iterable(pieces), length))


def texts_in(value: object, depth: int) -> Iterator[str]:
    """Yield the texts in a JSON value, in order, each with a mark after it."""
    if isinstance(value, str):
        yield value
        yield "\n"
    elif isinstance(value, dict | list) and depth > 0:
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_in(item, depth - 1)
