"""The keys and values that a model-free node computes: each token's are known, so right and wrong bytes can
be told apart.

Those of a token depend on everything that a model's depend on: the tokens before it, the adapter, items and
vectors in the prompt, and the model. They also depend on the cache salt, which does not change what a model
computes, so that a cache that is shared although the salts differ has wrong values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from .shapes import CacheShape, Request

#: What the node writes into every free block. No token has such a value, and every dtype of 16 bits or more
#: represents it exactly.
POISON = -64.0


@dataclass(frozen=True)
class TokenValues:
    """The values of one request.

    Attributes:
        model: Name of the model that computes them.
        seed: Distinguishes several computations of the same prompt, for tests that need them to differ.
    """

    request: Request
    model: str
    seed: int
    shape: CacheShape

    def between(self, first: int, last: int) -> torch.Tensor:
        """Return the values of tokens `first` to `last - 1`: `(num_layers, num_tokens, 2, num_kv_heads,
        head_size)`.

        Tokens past the prompt are those of the answer.
        """
        shape = self.shape
        per_token = (shape.num_layers, 2, shape.num_kv_heads, shape.head_size)
        rows = [
            np.frombuffer(hashlib.shake_256(digest).digest(int(np.prod(per_token))), np.uint8)
            for position, digest in enumerate(self._digests(last))
            if position >= first
        ]
        # Whole numbers from 1 to 64: every dtype of 16 bits or more represents them exactly.
        numbers = 1 + (np.stack(rows) % 64 if rows else np.zeros((0, int(np.prod(per_token))), np.uint8))
        values = torch.from_numpy(numbers.astype(np.float32)).view(-1, *per_token)
        return values.transpose(0, 1).to(shape.dtype)

    def _digests(self, num_tokens: int) -> Iterator[bytes]:
        request = self.request
        digest = repr((self.model, request.lora_id, request.cache_salt, self.seed)).encode()
        token_ids = request.prompt_token_ids
        for position in range(num_tokens):
            is_prompt = position < request.num_prompt_tokens
            token: list[object] = [token_ids[position] if is_prompt else f"answer {position}"]
            token += [
                (item.identifier, position - item.offset)
                for item in request.mm_features
                if item.offset <= position < item.offset + item.length
            ]
            if request.prompt_embeds is not None and is_prompt:
                token.append(request.prompt_embeds[position].tolist())
            digest = hashlib.blake2b(digest + repr(token).encode(), digest_size=16).digest()
            yield digest


class Journal:
    """Everything that the nodes of one test have computed.

    It names the values that a test finds in a wrong place.
    """

    def __init__(self) -> None:
        self._computed: dict[tuple[str, str, int], tuple[TokenValues, int]] = {}

    def note(self, values: TokenValues, num_tokens: int) -> None:
        """Note that a node computes the first tokens of a request."""
        key = (values.request.request_id, values.model, values.seed)
        before = self._computed[key][1] if key in self._computed else 0
        frozen = replace(values, request=replace(values.request))
        self._computed[key] = (frozen, max(before, num_tokens))

    def name(self, found: torch.Tensor) -> str:
        """Say whose values one layer of one token, `(2, num_kv_heads, head_size)`, contains."""
        if bool((found == POISON).all()):
            return "the contents of a free block: nothing was written here, or it was copied from a block after it was freed"
        for values, num_tokens in self._computed.values():
            known = values.between(0, num_tokens)
            if known.shape[2:] != found.shape:
                continue
            is_same = (known == found).flatten(2).all(dim=2).nonzero()
            if len(is_same):
                layer, token = is_same[0].tolist()
                return (
                    f"the values of token {token} of request {values.request.request_id!r} in layer {layer}"
                )
        num_poisoned = int((found == POISON).sum())
        if num_poisoned:
            return f"values of no token; {num_poisoned} of {found.numel()} elements are those of a free block"
        return "values of no token that a node computed"
