"""The endpoints at which clients ask for answers: one table of what serves each of them, and how it goes.

The table makes the router's routes and its OpenAPI page. `docs/openai-api.md` has the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: `handed over`: there is a prompt to compute and an answer to give. `to one node`: a decode node gets the
#: request unchanged. `refused`: it is about something that the router does not keep.
Way = Literal["handed over", "to one node", "refused"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and its methods.

    Attributes:
        summary: What it does, in one sentence.
        required: Fields that a body must have.
        is_of_reference: Reference nodes serve it. Servers of vLLM serve every endpoint that is not refused.
        needs: What a server of vLLM needs to serve it; empty if nothing.
        why: Why it is refused, and what to do.
    """

    path: str
    way: Way
    summary: str
    required: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("POST",)
    is_of_reference: bool = False
    needs: str = ""
    why: str = ""

    @property
    def served_by(self) -> str:
        """The kinds of nodes that serve it."""
        if self.way == "refused":
            return "no node"
        vllm = f"vLLM nodes with {self.needs}" if self.needs else "vLLM nodes"
        return f"reference nodes and {vllm}" if self.is_of_reference else vllm


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/inference/v1/generate"

_NOT_KEPT = "the router keeps no responses: send all earlier items in 'input', or close the connection to stop an answer"
_POOLING = "a pooling model"
_RANKS = ("Sort documents by how well they fit a query.", ("query", "documents"))

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(COMPLETIONS, "handed over", "Continue prompts.", ("prompt",), is_of_reference=True),
    Endpoint(CHATS, "handed over", "Answer the last message of a chat.", ("messages",), is_of_reference=True),
    Endpoint(RESPONSES, "handed over", "Answer in the form of OpenAI's Responses.", ("input",)),
    Endpoint(
        MESSAGES,
        "handed over",
        "Answer in the form of Anthropic's Messages.",
        ("model", "messages", "max_tokens"),
    ),
    Endpoint(
        GENERATE,
        "handed over",
        "Continue token ids with token ids.",
        ("token_ids", "sampling_params"),
        needs="--enable-scale-out",
    ),
    Endpoint(f"{MESSAGES}/count_tokens", "to one node", "Count a prompt's tokens.", ("model", "messages")),
    Endpoint("/tokenize", "to one node", "Turn a text or a chat into token ids."),
    Endpoint("/detokenize", "to one node", "Turn token ids into a text.", ("tokens",)),
    Endpoint("/v1/embeddings", "to one node", "Embed texts.", needs=_POOLING),
    Endpoint("/pooling", "to one node", "Return what a pooling model makes of texts.", needs=_POOLING),
    Endpoint("/classify", "to one node", "Classify texts.", needs=_POOLING),
    *(
        Endpoint(path, "to one node", "Score pairs of texts.", needs=_POOLING)
        for path in ("/score", "/v1/score")
    ),
    *(
        Endpoint(path, "to one node", *_RANKS, needs=_POOLING)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Endpoint(
        f"{RESPONSES}/{{response_id}}",
        "refused",
        "Return or delete a response: refused, none is kept.",
        methods=("GET", "DELETE"),
        why=_NOT_KEPT,
    ),
    Endpoint(
        f"{RESPONSES}/{{response_id}}/cancel",
        "refused",
        "Cancel a response: refused, none is kept.",
        why=_NOT_KEPT,
    ),
    Endpoint(
        f"{RESPONSES}/{{response_id}}/input_items",
        "refused",
        "List the input of a response: refused, none is kept.",
        methods=("GET",),
        why=_NOT_KEPT,
    ),
)

_BY_PATH = {endpoint.path: endpoint for endpoint in ENDPOINTS}


def endpoint_at(path: str) -> Endpoint | None:
    """Return the endpoint of a path; None if the path is none of the table's."""
    return _BY_PATH.get(path)


def has_form_of_messages(path: str) -> bool:
    """Whether the errors of a path have Anthropic's form."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")
