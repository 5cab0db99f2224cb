"""Which node has how much of a prompt in its prefix cache: by what the node says it stored, and by what was
sent where.

A prompt is a chain of pieces, each with a key that covers all pieces before it. The index keeps the nodes of
each key, and drops the keys that were not used for the longest time. Pure.

A node that publishes events names its blocks with their token ids. These become the same keys as those of a
prompt of token ids, so such a prompt is looked up exactly, whatever the engine's hash function is. A text has
no token ids here. That a node has it is a guess, and ends with the first block that the node removes of those
that it stored while it worked on the text.

What must never break: it only guesses. A node that has less than is known here computes more, and nothing
else. What a node says takes room from no other node.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

#: Deeper values do not count: `messages[0]["content"][0]["image_url"]["url"]` has depth 6.
MAX_DEPTH = 8
#: Tokens per piece of a prompt of token ids, and bytes per piece of a text.
PIECE_TOKENS, PIECE_BYTES = 16, 64
#: Keys that are kept.
MAX_KEYS = 1 << 20
#: Pieces per prompt that are looked at.
MAX_PIECES = 4096
#: The fields of which a chat's prompt is made, as most chat templates order them.
TEXTS_OF_CHATS = ("tools", "instructions", "system", "messages", "input")
#: Nodes that an index tells apart; with another one it begins anew. Restarted nodes count again.
MAX_NODES = 1024
#: The latest blocks of a node among which are those that it stored during a request.
MAX_RECENT_BLOCKS = 4096
#: Requests that hang on one block. With more, the oldest is forgotten.
MAX_USES_OF_BLOCK = 64
#: Kinds of places in which a node may say that it keeps a block.
MAX_PLACES = 32
#: With more keys of one node, forgetting all of them is not done one by one.
MAX_CLEARED_KEYS = 1 << 14

#: As an engine names a block.
BlockHash = int | bytes
#: A group of layers, and the kind of memory.
Place = tuple[int, str]


@dataclass(frozen=True)
class BlocksStored:
    """A node has stored blocks that follow each other.

    Attributes:
        parent: The block before them; None if they begin a prompt.
        token_ids: Of all of them.
        block_size: Tokens per block.
        root: What else their contents depend on; see `root_key`. None if a key here could not say it, as with
            images.
    """

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    place: Place
    root: int | None


@dataclass(frozen=True)
class BlocksRemoved:
    """A node has removed blocks."""

    hashes: Sequence[BlockHash]
    place: Place


@dataclass(frozen=True)
class AllCleared:
    """A node has removed all blocks."""


Event = BlocksStored | BlocksRemoved | AllCleared


class _Use:
    """A request's pieces that a node is believed to have, until it removes a block on which this hangs."""

    __slots__ = ("keys",)

    def __init__(self, keys: Sequence[int]) -> None:
        self.keys = keys


class _Held:
    """What the events of one node say.

    Attributes:
        blocks: Block → its keys, and a bit per place that has it.
        num_keys: Of all blocks.
        num_stored: Blocks so far.
        recent: The latest of them.
        bound: Keys of which only a use says that the node has them.
        uses: In the order in which they came.
        hanging: Block → the uses that end with it.
        late: Uses to which the blocks of the next batch belong as well: it may have been under way when the
            answer came.
    """

    def __init__(self) -> None:
        self.num_stored = 0
        self.places: dict[Place, int] = {}
        self.recent: deque[BlockHash] = deque(maxlen=MAX_RECENT_BLOCKS)
        self.clear()

    def clear(self) -> None:
        self.blocks: dict[BlockHash, tuple[tuple[int, ...], int]] = {}
        self.num_keys = self.num_bound = 0
        self.bound: dict[int, _Use] = {}
        self.uses: dict[_Use, None] = {}
        self.hanging: dict[BlockHash, list[_Use]] = {}
        self.late: list[_Use] = []
        self.recent.clear()

    def bit_of(self, place: Place) -> int:
        """Return the bit of a place; 0 if there are too many."""
        if place not in self.places and len(self.places) < MAX_PLACES:
            self.places[place] = 1 << len(self.places)
        return self.places.get(place, 0)

    def stored_since(self, mark: int) -> list[BlockHash]:
        """Return the blocks that were stored since a mark and are still there."""
        num = min(self.num_stored - mark, len(self.recent))
        latest = [self.recent[index] for index in range(len(self.recent) - num, len(self.recent))]
        return [block for block in latest if block in self.blocks]


class Prefixes:
    """The index.

    Attributes:
        own_models: Names of the nodes' own models, by node. The other names are those of adapters.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._nodes: dict[int, int] = {}  # key → a bit per node
        self._bits: dict[str, int] = {}  # URL → its bit
        self._urls: dict[int, str] = {}  # and back
        self._num_bits = 0
        self._held: dict[str, _Held] = {}  # of nodes whose events are followed
        self.own_models: dict[str, frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def followed(self) -> AbstractSet[str]:
        """The nodes whose events are followed."""
        return self._held.keys()

    def num_blocks(self, url: str) -> int | None:
        """Return how many blocks a node has by its events; None if they are not followed."""
        held = self._held.get(url)
        return None if held is None else len(held.blocks)

    def keys_of(self, body: Mapping[str, Any]) -> list[int]:
        """Return the keys of the whole pieces of a request's prompt."""
        return keys_of(body, frozenset().union(*self.own_models.values()))

    # -- what was sent where -------------------------------------------------------------------------

    def mark(self, url: str) -> int:
        """Return what `add` is to be given for a request that is sent to a node now."""
        return held.num_stored if (held := self._held.get(url)) else 0

    def add(self, keys: Sequence[int], url: str, mark: int | None = None) -> None:
        """Note that a node has computed or loaded these pieces.

        Args:
            mark: The node's `mark` when it was asked. None: it was asked just now.
        """
        held = self._held.get(url)
        if held is None:
            bit = self._bit_of(url)
            for key in keys:
                self._nodes[key] = self._nodes.pop(key, 0) | bit
            self._shrink()
        elif keys and not (_is_of_token_ids(keys[0]) and held.num_keys):
            # Of token ids the events tell everything, if the node's blocks have keys.
            use = _Use(keys)
            held.late.append(use)
            self._hang(held, url, use, held.stored_since(held.num_stored if mark is None else mark))

    def add_later(self, keys: Sequence[int], url: str, mark: int) -> None:
        """Note that a node whose events are followed has worked on these pieces until now."""
        if url in self._held:
            self.add(keys, url, mark)

    def forget(self, url: str) -> None:
        """Forget what a node has had, because its process has ended.

        Its events are followed again from the next batch on.
        """
        self._drop_bit(url)
        self._held.pop(url, None)
        self.own_models.pop(url, None)

    def unfollow(self, url: str) -> None:
        """Guess again what a node has, because its events do not come any more."""
        self.clear(url)
        self._held.pop(url, None)

    # -- what nodes say ------------------------------------------------------------------------------

    def apply(self, url: str, batch: Iterable[Event]) -> None:
        """Take in a batch of a node's events.

        From the first one on, what the node has is what its events say.
        """
        if url not in self._held:
            self._drop_bit(url)
            self._held[url] = _Held()
        held = self._held[url]
        late, held.late = held.late, []
        mark = held.num_stored
        for event in batch:
            if isinstance(event, BlocksStored):
                self._stored(held, url, event)
            elif isinstance(event, BlocksRemoved):
                place = held.bit_of(event.place)
                for block in event.hashes:
                    self._removed(held, url, block, place)
            else:
                self.clear(url)
        for use in late:
            if use.keys:
                self._hang(held, url, use, held.stored_since(mark))
        self._shrink()

    def clear(self, url: str) -> None:
        """Forget what a followed node has: it removed everything, or events of it were lost."""
        if (held := self._held.get(url)) is None:
            return
        if held.num_keys + len(held.bound) > MAX_CLEARED_KEYS:
            self._drop_bit(url)
        else:
            for keys, _ in held.blocks.values():
                self._take_away(keys, url)
            self._take_away(held.bound, url)
        held.clear()

    def _stored(self, held: _Held, url: str, event: BlocksStored) -> None:
        bit, place = self._bit_of(url), held.bit_of(event.place)
        share = self._max_keys // (1 + len(self._held))
        for block, keys in zip(event.hashes, _keys_of_blocks(held, event), strict=True):
            known, places = held.blocks.pop(block, ((), 0))
            held.num_keys -= len(known)
            held.blocks[block] = keys or known, places | place
            held.num_keys += len(keys or known)
            held.num_stored += 1
            held.recent.append(block)
            for key in keys:
                self._nodes[key] = self._nodes.pop(key, 0) | bit
                held.bound.pop(key, None)
            if keys and known and keys != known:
                self._take_away(known, url)
            # A node that claims more than its share loses its own oldest blocks here.
            while held.num_keys > share or len(held.blocks) > share:
                self._removed(held, url, next(iter(held.blocks)), -1)

    def _removed(self, held: _Held, url: str, block: BlockHash, place: int) -> None:
        keys, places = held.blocks.get(block, ((), 0))
        if left := places & ~place:
            held.blocks[block] = keys, left
            return
        if held.blocks.pop(block, None) is not None:
            held.num_keys -= len(keys)
            self._take_away(keys, url)
        for use in held.hanging.pop(block, ()):
            self._end(held, url, use)

    def _hang(self, held: _Held, url: str, use: _Use, blocks: Sequence[BlockHash]) -> None:
        """Let a use end with the first of these blocks that is removed.

        If the node has stored none for it, then it had the prompt already. An engine removes what was not
        used for the longest time, so the use ends with the latest block that the node has stored before.
        """
        is_new = use not in held.uses
        if not blocks and is_new:
            blocks = [next(reversed(held.blocks))] if held.blocks else ()
        if not blocks:
            return
        if is_new:
            bit = self._bit_of(url)
            held.uses[use] = None
            held.num_bound += len(use.keys)
            for key in use.keys:
                self._nodes[key] = self._nodes.pop(key, 0) | bit
                held.bound[key] = use
        for block in blocks:
            uses = held.hanging.setdefault(block, [])
            if len(uses) >= MAX_USES_OF_BLOCK:
                self._end(held, url, uses.pop(0))
            uses.append(use)
        share = self._max_keys // (1 + len(self._held))
        while held.num_bound > share:
            self._end(held, url, next(iter(held.uses)))
        self._shrink()

    def _end(self, held: _Held, url: str, use: _Use) -> None:
        """Forget the pieces of a use, except for those that a later one has as well."""
        if use not in held.uses:
            return
        del held.uses[use]
        held.num_bound -= len(use.keys)
        gone = [key for key in use.keys if held.bound.get(key) is use]
        for key in gone:
            del held.bound[key]
        self._take_away(gone, url)
        use.keys = ()

    def _take_away(self, keys: Iterable[int], url: str) -> None:
        bit = self._bits.get(url, 0)
        for key in keys:
            if (bits := self._nodes.get(key, 0)) & bit:
                if bits == bit:
                    del self._nodes[key]
                else:
                    self._nodes[key] = bits ^ bit

    def _bit_of(self, url: str) -> int:
        if (bit := self._bits.get(url)) is None:
            if self._num_bits >= MAX_NODES:
                self._nodes.clear()
                self._bits.clear()
                self._urls.clear()
                self._num_bits = 0
                for held in self._held.values():
                    held.clear()
            bit = self._bits[url] = 1 << self._num_bits
            self._urls[bit] = url
            self._num_bits += 1
        return bit

    def _drop_bit(self, url: str) -> None:
        """Forget all keys of a node at once. Its next ones get another bit."""
        self._urls.pop(self._bits.pop(url, 0), None)

    def _shrink(self) -> None:
        while len(self._nodes) > self._max_keys:
            del self._nodes[next(iter(self._nodes))]

    # -- the question --------------------------------------------------------------------------------

    def shares(self, keys: Sequence[int]) -> Mapping[str, float]:
        """Return the share of a prompt that each node has: URL → 0 to 1.

        Those without a share are left out.
        """
        if not keys:
            return {}
        counts: dict[int, int] = {}  # number of pieces → the nodes that have exactly these
        held = -1
        for number, key in enumerate(keys):
            still = self._nodes.get(key, 0) & held
            if gone := held & ~still if number else 0:
                counts[number] = gone
            held = still
            if not held:
                break
        else:
            counts[len(keys)] = held
        found = {}
        for number, bits in counts.items():
            while bits:
                bit = bits & -bits
                bits ^= bit
                # The bits of processes that have ended are still in the index.
                if url := self._urls.get(bit):
                    found[url] = number / len(keys)
        return found


def root_key(adapter: str, salt: str) -> int:
    """Return the key before the first piece: an adapter or a salt changes what a prefix cache has."""
    return hash((adapter, salt))


def keys_of(body: Mapping[str, Any], own_models: AbstractSet[str] = frozenset()) -> list[int]:
    """Return the keys of the whole pieces of a request's prompt.

    Args:
        own_models: Names of nodes' own models. The other names are those of adapters.
    """
    model = str(body.get("model") or "")
    key = root_key("" if model in own_models else model, str(body.get("cache_salt") or ""))
    keys = []
    of_text, pieces = _pieces(body)
    for piece in pieces:
        key = _next_key(key, piece) | of_text
        keys.append(key)
        if len(keys) == MAX_PIECES:
            break
    return keys


def _next_key(key: int, piece: bytes) -> int:
    return hash((key, piece)) & ~1


def _is_of_token_ids(key: int) -> bool:
    """Whether it is the key of a piece of token ids, which are even."""
    return not key & 1


def _pieces(body: Mapping[str, Any]) -> tuple[int, Iterator[bytes]]:
    """Return 1 for a text and 0 for token ids, and the pieces."""
    prompt = body.get("prompt") or body.get("token_ids")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a list with one prompt
    if isinstance(prompt, list):
        return 0, _pieces_of_tokens(prompt)
    told = _texts_in([prompt, *map(body.get, TEXTS_OF_CHATS)], MAX_DEPTH)
    return 1, _cut("".join(told).encode(errors="surrogatepass"), PIECE_BYTES)


def _pieces_of_tokens(token_ids: Sequence[int]) -> Iterator[bytes]:
    try:
        raw = array("q", token_ids).tobytes()
    except (TypeError, OverflowError):
        return iter(())
    return _cut(raw, 8 * PIECE_TOKENS)


def _cut(raw: bytes, size: int) -> Iterator[bytes]:
    return (raw[at : at + size] for at in range(0, len(raw) - size + 1, size))


def _keys_of_blocks(held: _Held, event: BlocksStored) -> list[tuple[int, ...]]:
    """Return the keys of each block; none where its prompt is not known, or its size is no multiple of a
    piece's.
    """
    nothing: list[tuple[int, ...]] = [() for _ in event.hashes]
    if event.root is None or event.block_size % PIECE_TOKENS:
        return nothing
    if len(event.token_ids) != len(event.hashes) * event.block_size:
        return nothing
    key = event.root
    if event.parent is not None:
        before, _ = held.blocks.get(event.parent, ((), 0))
        if not before:
            return nothing
        key = before[-1]
    keys: list[int] = []
    for piece in _pieces_of_tokens(event.token_ids):
        key = _next_key(key, piece)
        keys.append(key)
    per_block = event.block_size // PIECE_TOKENS
    found = [tuple(keys[at : at + per_block]) for at in range(0, len(keys), per_block)]
    return found if len(found) == len(nothing) else nothing


def _texts_in(value: object, depth: int) -> Iterator[str]:
    """Yield the texts in a JSON value, in order, each with a mark after it."""
    if isinstance(value, str):
        yield value
        yield "\n"
    elif isinstance(value, dict | list) and depth > 0:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(item, depth - 1)
