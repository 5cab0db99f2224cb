"""What a request's blocks were computed from: two requests that agree in it may have each other's."""

from __future__ import annotations

import json
from array import array
from hashlib import sha256
from typing import Any

__all__ = ["content_digest"]


def content_digest(request: Any, num_tokens: int) -> str:
    """Sum up the first tokens of a request's prompt, and what vLLM computes them with.

    Args:
        request: vLLM's. Beside its tokens count its LoRA adapter, its cache salt, and images and embeddings among the tokens.

    Returns:
        32 hexadecimal digits; equal only if all of that is.
    """
    lora, embeds = request.lora_request, request.prompt_embeds
    media = [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
        if feature.mm_position.offset < num_tokens
    ]
    digest = sha256(json.dumps([lora and lora.lora_name, request.cache_salt, media]).encode())
    digest.update(array("q", (request.prompt_token_ids or ())[:num_tokens]).tobytes())
    if embeds is not None:
        digest.update(embeds[:num_tokens].detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
