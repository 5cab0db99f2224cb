"""Digests of what a prompt's KV cache was computed from.

Requests with equal digests may use each other's blocks.

Both hosts, the reference engine and vLLM, compute the digest of a handoff here: `content_digest`. The
producer puts it into its offer and repeats it in its grant. The consumer compares it with the digest of its
own prompt before it reads a byte. Stores name blocks by `block_digests`.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import sha256
from typing import TYPE_CHECKING

import msgpack

if TYPE_CHECKING:
    import torch

    from ..base import ConnectorRequest
    from ..config import EngineConfig
    from ..kv_cache_specs import KVCacheSpec

#: Part of what is hashed. Change it together with what is hashed, so that old and new nodes get different
#: digests.
_FORM = "kvferry-content-1"
_BLOCK_FORM = "kvferry-block-1"


def content_digest(request: ConnectorRequest, num_tokens: int) -> str:
    """Hash the first `num_tokens` tokens of a request, and everything else that their cache depends on.

    That is: the token ids, the items among them (images, sounds, vectors) with their positions, embeddings
    that replace the tokens, the adapter, and the cache salt. What comes after those tokens is not hashed, so
    a decode node's prompt may be longer than what it is offered. A shorter prompt has another digest.

    Tokens past the prompt are those of the answer. So the next prompt of a conversation has the digest of the
    earlier one and its answer, if it begins with the same tokens.

    Returns:
        64 hexadecimal digits.
    """
    items = [
        (feature.identifier, feature.offset, feature.length)
        for feature in request.mm_features
        if feature.offset < num_tokens
    ]
    is_prompt = num_tokens <= request.num_prompt_tokens
    token_ids = (request.prompt_token_ids if is_prompt else request.all_token_ids)[:num_tokens]
    head = [_FORM, len(token_ids), num_tokens, request.lora_id, request.cache_salt, items]
    digest = sha256(msgpack.packb(head, unicode_errors="surrogatepass"))
    digest.update(array("q", token_ids).tobytes())
    if request.prompt_embeds is not None:
        digest.update(_bytes_of(request.prompt_embeds[:num_tokens]))
    return digest.hexdigest()


def block_digests(request: ConnectorRequest, config: EngineConfig, spec: KVCacheSpec) -> list[str]:
    """Hash each whole block of a request's prompt, together with everything that its bytes depend on.

    That is: the model and its adapters, the form of a page, the request's adapter and cache salt, and all
    tokens up to the block's end, with the items among them and embeddings that replace them. The digests are
    a chain: two prompts with the same first blocks have the same first digests. They do not depend on the
    process, so nodes can share a store.

    Args:
        spec: Of the group to which the blocks belong.

    Returns:
        64 hexadecimal digits per whole block, first block first.
    """
    model, identity, size = config.model, config.model.identity, spec.block_size
    made_by = [model.model, model.dtype, identity.configuration, identity.weights, identity.adapters]
    head = [_BLOCK_FORM, sys.byteorder, *made_by, repr(spec), request.lora_id, request.cache_salt]
    parent = sha256(msgpack.packb(head, unicode_errors="surrogatepass")).digest()
    digests = []
    for start in range(0, request.num_prompt_tokens - size + 1, size):
        end = start + size
        # An item counts in the block where it begins. The chain carries it into the other blocks that it
        # covers.
        items = [
            (feature.identifier, feature.offset, feature.length)
            for feature in request.mm_features
            if start <= feature.offset < end
        ]
        digest = sha256(parent)
        digest.update(msgpack.packb(items, unicode_errors="surrogatepass"))
        digest.update(array("q", request.prompt_token_ids[start:end]).tobytes())
        if request.prompt_embeds is not None:
            digest.update(_bytes_of(request.prompt_embeds[start:end]))
        parent = digest.digest()
        digests.append(digest.hexdigest())
    return digests


def _bytes_of(embeds: torch.Tensor) -> bytes:
    return embeds.detach().float().cpu().numpy().tobytes()
