"""The digest of what a prompt's KV cache was computed from. Requests with equal digests may use each other's blocks.

Both hosts, the reference engine and vLLM, compute their digests here. The producer puts the digest into its offer and
repeats it in its grant. The consumer compares it with the digest of its own prompt before it reads a byte.
"""

from __future__ import annotations

from array import array
from hashlib import sha256
from typing import TYPE_CHECKING

import msgpack

if TYPE_CHECKING:
    from .base import ConnectorRequest

#: Part of what is hashed. Change it together with what is hashed, so that old and new nodes get different digests.
_FORM = "kvferry-content-1"


def content_digest(request: ConnectorRequest, num_tokens: int) -> str:
    """Hash the first `num_tokens` tokens of a request's prompt, and everything else that their cache depends on.

    That is: the token ids, the items among them (images, sounds, vectors) with their positions, embeddings that replace
    the tokens, the adapter, and the cache salt. What comes after those tokens is not hashed, so a decode node's prompt may
    be longer than what it is offered. A shorter prompt has another digest.

    Returns:
        64 hexadecimal digits.
    """
    items = [
        (feature.identifier, feature.offset, feature.length)
        for feature in request.mm_features
        if feature.offset < num_tokens
    ]
    token_ids = request.prompt_token_ids[:num_tokens]
    head = [_FORM, len(token_ids), num_tokens, request.lora_id, request.cache_salt, items]
    digest = sha256(msgpack.packb(head, unicode_errors="surrogatepass"))
    digest.update(array("q", token_ids).tobytes())
    embeds = request.prompt_embeds
    if embeds is not None:
        digest.update(embeds[:num_tokens].detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()
