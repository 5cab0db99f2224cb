"""What the work of a node costs, and the file that it is kept in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ...router.http.files import text_of
from ...transports.checked import Refused, json_of, shown
from ...transports.errors import ConfigurationError

#: A file of costs is a few hundred bytes.
MAX_BYTES = 1 << 16
#: No time in seconds and no number of tokens is larger; sums and products of them stay finite.
MAX_VALUE = 1e15


@dataclass(frozen=True)
class Costs:
    """What a node takes, as straight lines.

    The default was measured with vLLM 0.32 and SmolLM2-135M on one core.

    Attributes:
        step_s: Per step, whatever is in it.
        prompt_token_s: Per prompt token of a step.
        answer_s: Per answer that gets a token in a step.
        chunk_tokens: Tokens of a step (vLLM's `--max-num-batched-tokens`).
        handover_s: Per handover.
        handed_token_s: Per token of it. The link of the node that sends takes one handover after the other.
        request_s: Per request, outside of the steps: HTTP and the tokenizer.
        context_s: Per prompt token of a step, and token before it.
        answer_context_s: Per answer of a step, and token before it.
        mixed_s: Per step that has both prompt tokens and answers, beside what each of them takes.
        pool_tokens: Tokens that the node's blocks have room for.
        max_requests: Requests in a step (vLLM's `--max-num-seqs`).
    """

    step_s: float = 0.024
    prompt_token_s: float = 0.0009
    answer_s: float = 0.005
    chunk_tokens: int = 512
    handover_s: float = 0.03
    handed_token_s: float = 2e-5
    request_s: float = 0.0
    context_s: float = 0.0
    answer_context_s: float = 0.0
    mixed_s: float = 0.0
    pool_tokens: int = 1 << 30
    max_requests: int = 256

    def chunks(self, num_tokens: int) -> int:
        """Return the steps that a prompt takes at an idle node."""
        return -(-num_tokens // self.chunk_tokens)

    def step_of_prompt_s(self, num_tokens: int, num_before: int) -> float:
        """Return the seconds that a part of a prompt adds to a step, if `num_before` tokens of the prompt
        come before it.
        """
        pairs = num_tokens * (num_before + num_tokens / 2)
        return num_tokens * self.prompt_token_s + pairs * self.context_s

    def unloaded_ttft_s(self, num_tokens: int) -> float:
        """Return what the first token takes at an idle node that has cached nothing."""
        return self.request_s + self.chunks(num_tokens) * self.step_s + self.step_of_prompt_s(num_tokens, 0)

    @property
    def unloaded_itl_s(self) -> float:
        """What the next token of a short answer takes at an idle node."""
        return self.step_s + self.answer_s


def write_costs(costs: Costs, path: Path) -> None:
    """Write a file that `read_costs` reads."""
    path.write_text(json.dumps(asdict(costs), indent=2) + "\n")


def read_costs(path: Path) -> Costs:
    """Read a file of costs. A value that it lacks is the default.

    Raises:
        ConfigurationError: The file cannot be read, or a value makes no sense.
    """

    def wrong(why: str) -> ConfigurationError:
        text = f"--costs={str(path)!r}: {why}; write it again with `kvferry plan --measure URL`"
        return ConfigurationError(text, key="--costs", value=str(path))

    try:
        told = json_of(text_of(path, MAX_BYTES))
    except OSError as error:
        raise wrong(f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise wrong(f"no JSON could be read: {error}") from error
    except Refused as refused:
        raise wrong(f"no JSON could be read: it {refused.why}") from refused
    if not isinstance(told, dict):
        raise wrong("it must be a JSON object")
    kinds = {each.name: type(each.default) for each in fields(Costs)}
    for name, value in told.items():
        if name not in kinds:
            raise wrong(f"unknown key {name!r}; the keys are {', '.join(kinds)}")
        is_number = type(value) is kinds[name] or (kinds[name] is float and type(value) is int)
        lowest = 1 if kinds[name] is int else 0
        if not is_number or not lowest <= value <= MAX_VALUE:
            raise wrong(f"{name} must be a number from {lowest} to {MAX_VALUE:g}; got {shown(value)}")
    return Costs(**told)
