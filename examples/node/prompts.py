"""From what a client wrote to the token ids that the model reads."""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from web.errors import bad_request

from .openai_request import ChatPrompt

__all__ = ["tokenize"]


def tokenize(
    tokenizer: PreTrainedTokenizerBase, prompt: str | tuple[int, ...] | ChatPrompt
) -> tuple[int, ...]:
    """Encode a prompt; a chat goes through the model's own template.

    Raises:
        ApiError: a token id that the model does not have, a text that is not Unicode, a chat that the model's
            template refuses, or an empty prompt (400).
    """
    if isinstance(prompt, tuple):
        return _known_tokens(tokenizer, prompt)
    if isinstance(prompt, ChatPrompt):
        token_ids = _encode(tokenizer, _chat_text(tokenizer, prompt), "messages", add_special_tokens=False)
    else:
        token_ids = _encode(tokenizer, prompt, "prompt", add_special_tokens=True)
    if not token_ids:
        raise bad_request("the prompt is empty: it needs at least one token", "prompt")
    return token_ids


def _known_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    size = len(tokenizer)
    for token_id in token_ids:
        if not 0 <= token_id < size:
            raise bad_request(f"token id {token_id} is not in the vocabulary of {size} tokens", "prompt")
    return token_ids


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, param: str, *, add_special_tokens: bool
) -> tuple[int, ...]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(f"the text is not valid Unicode: {error}", param) from None
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))


def _chat_text(tokenizer: PreTrainedTokenizerBase, chat: ChatPrompt) -> str:
    if not tokenizer.chat_template:
        raise bad_request("this model has no chat template: use /v1/completions", "messages")
    messages: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in chat.messages]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise bad_request(f"the model's chat template refuses the messages: {error}", "messages") from None
