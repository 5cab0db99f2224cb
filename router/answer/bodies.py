"""What nodes receive of a request, made from the client's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..http.errors import bad_request
from ..http.json_body import Fields, refuse_stream_options_alone
from .beginnings import Beginning
from .dialects import Dialect, check_refused

#: Most prompts per request.
MAX_PROMPTS = 256
#: The request to a prefill node to offer its cache. vLLM's nodes require the other keys.
DO_REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def check_body(body: Mapping[str, Any], dialect: Dialect) -> None:
    """Check the fields that the prefill node does not receive, and those that the router cannot serve.

    If only the decode node refused the request, the prefill would have been wasted.

    Raises:
        ApiError: A field is wrong (400).
    """
    fields = Fields(body)
    counts = fields.mapping(dialect.inside) if dialect.inside else body
    for name in (dialect.limit, "max_completion_tokens", "n", "best_of"):
        # An answer that is nothing but the echo of its prompt has no token of its own.
        least = 0 if name.startswith("max") and body.get("echo") is True else 1
        if Fields(counts).integer(name, least) < least:
            code = "unsupported_value" if name == "best_of" else None  # as nodes say it
            raise bad_request(f"{name}={counts[name]}: it must be at least {least}", name, code)
    _refuse_several("prompt_embeds", body.get("prompt_embeds"))
    fields.boolean("stream", False)
    Fields(fields.mapping("stream_options")).boolean("include_usage", False)
    refuse_stream_options_alone(body)
    check_refused(body, dialect)


def body_for_nodes(body: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Return a checked body with what all nodes receive, and without a client's own offer.

    At the top it is replaced later. Inside sampling parameters it would reach a node's engine: a client could
    let the node connect to any address.
    """
    result = {**body, **dialect.always}
    if dialect.inside and isinstance(own := result.get(dialect.inside), dict):
        extra = own.get("extra_args")
        if isinstance(extra, dict) and "kv_transfer_params" in extra:
            extra = {key: value for key, value in extra.items() if key != "kv_transfer_params"}
            result[dialect.inside] = {**own, "extra_args": extra}
    return result


def _refuse_several(name: str, value: object) -> None:
    """Refuse several prompts of a kind that the router cannot split."""
    if isinstance(value, list) and len(value) > 1 and any(isinstance(item, str | list) for item in value):
        message = (
            f"{name!r} has {len(value)} prompts: each needs a handoff of its own; send one request per prompt"
        )
        raise bad_request(message, name)


def must_compute_alone(body: Mapping[str, Any], dialect: Dialect) -> bool:
    """Whether a server of vLLM computes the prompt of a request itself, whatever it is offered.

    The log probabilities of a prompt's tokens come only from computing it, and vLLM gives no
    `kv_transfer_params` to a beam search. An offer would hold blocks until its lease ends, for nothing.
    """
    sampling = Fields(body).mapping(dialect.inside) if dialect.inside else body
    if sampling.get("use_beam_search") is True or sampling.get("prompt_logprobs") is not None:
        return True
    # A chat that is echoed has the log probabilities of its prompt computed even if it shows none.
    return body.get("echo") is True and ("messages" in body or body.get("logprobs") is not None)


def prefill_body(
    body: Mapping[str, Any],
    dialect: Dialect,
    *,
    wish: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the body for the prefill node: compute one token of one answer, and keep the blocks.

    Args:
        wish: More keys of `kv_transfer_params`.
    """
    params = {**DO_REMOTE_DECODE, **(wish or {})}
    told = {key: value for key, value in body.items() if key not in dialect.left_out}
    choice = body.get("tool_choice")
    if dialect.any_tool and isinstance(choice, dict) and choice.get("type") == "tool":
        told["tool_choice"] = dialect.any_tool
    # The likeliest token is the cheapest one.
    one_token: dict[str, Any] = {"temperature": 0, dialect.limit: 1}
    if dialect.inside:
        own = Fields(body).mapping(dialect.inside)
        one_token = {dialect.inside: {k: v for k, v in own.items() if k not in dialect.left_out} | one_token}
    return {**told, **one_token, "stream": False, "kv_transfer_params": params}


def decode_body(
    body: Mapping[str, Any],
    params: Mapping[str, Any] | None,
    after: Beginning | None = None,
) -> dict[str, Any]:
    """Return the body for the decode node: the client's, with the prefill node's parameters.

    Args:
        after: The node is to go on after these tokens.
    """
    if after is not None:
        return after.decode_body(body, params)
    result = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    return result | ({"kv_transfer_params": params} if params else {})


def headers_of(headers: Mapping[str, str], request_id: str, *, passes_keys_on: bool) -> dict[str, str]:
    """Return the headers of a client's request for nodes.

    They share one request id, as vLLM's nodes require.
    """
    own = {"X-Request-Id": request_id}
    if passes_keys_on and "Authorization" in headers:
        own["Authorization"] = headers["Authorization"]
    return own


def prompts_of(body: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a request, which are one unless the client has sent several.

    Raises:
        ApiError: it has too many, or some are texts and others token ids (400).
    """
    prompts = body.get("prompt")
    if not isinstance(prompts, list) or len(prompts) <= 1:
        return [prompts]
    kinds = set(map(type, prompts))
    if not kinds & {str, list}:
        return [prompts]
    if len(kinds) > 1:  # as vLLM and OpenAI do
        message = "'prompt' has items of different types: it must be token ids, or several prompts that are all texts or all token ids"
        raise bad_request(message, "prompt")
    if len(prompts) > MAX_PROMPTS:
        message = f"'prompt' has {len(prompts)} prompts: at most {MAX_PROMPTS} per request are possible"
        raise bad_request(message, "prompt")
    return prompts
