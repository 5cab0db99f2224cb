"""The servers that the steps share: one plain server per kind of model, and one pair at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from ..bench.vllm_pair import NIXL, settled
from ..client import Answer, ask
from ..demo.near_tie import ask_alone, compare, tolerance_of
from ..demo.vllm_server import ask_pair
from ..load import percentile
from ..prove.models import TOKENS
from ..servers import KVFERRY, LaunchedProcess, Launcher, free_port, start_vllm
from .models import ON_CPU, Scale, write_random_model
from .report import LOG_LINES

#: What vLLM counts of tokens that a connector loaded.
LOADED = "vllm:external_prefix_cache_hits_total"
#: Without it the two likeliest tokens are not known, and no near-tie either.
SCORES = {"logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}


class WrongAnswerError(Exception):
    """An answer is not the plain server's, or was not loaded."""


@dataclass(frozen=True)
class PairKind:
    """What a pair differs in from another one.

    Attributes:
        transport: kvferry's; empty: NixlConnector.
        cross_layer: Whether vLLM keeps a block of all layers in one run of bytes.
        model: A kind of model.
        arguments: Of both servers; `prefill_arguments`: of one in addition.
        gpus: The prefill and the decode server's CUDA_VISIBLE_DEVICES; empty: those of this process.
    """

    transport: str
    cross_layer: bool = False
    model: str = "llama"
    policy: str = "fail"
    arguments: tuple[str, ...] = ()
    prefill_arguments: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    def transfer(self, device: str) -> Mapping[str, Any]:
        """Return vLLM's KV transfer configuration."""
        if not self.transport:
            return {**NIXL, "kv_buffer_device": device}
        extra = {"transport": self.transport, "cross_layer_blocks": self.cross_layer}
        return {**KVFERRY, "kv_load_failure_policy": self.policy, "kv_connector_extra_config": extra}


@dataclass
class Pair:
    """Two servers, and their routers by options."""

    prefill: LaunchedProcess
    decode: LaunchedProcess
    launcher: Launcher
    routers: dict[tuple[str, ...], LaunchedProcess] = field(default_factory=dict)

    def router(self, *arguments: str) -> LaunchedProcess:
        """Return a router with these options, which is started when it is first needed."""
        if arguments not in self.routers:
            name = f"router-{len(self.routers) + 1}"
            router = self.launcher.start_router(name, [self.prefill], [self.decode], *arguments)
            self.routers[arguments] = router.wait_ready(60.0)
        return self.routers[arguments]


@dataclass(frozen=True)
class Compared:
    """A pair's answer beside the plain server's answer to the same prompt.

    Attributes:
        num_loaded: Tokens that the decode server loaded.
        near_ties: Tokens that differ although neither is wrong.
    """

    ours: Answer
    alone: Answer
    num_loaded: int
    near_ties: int


class Servers:
    """Start servers when a step needs them, and end them.

    Args:
        device: `cuda` or `cpu`.
        folder: For models and logs.
        more: Further arguments of every `vllm serve`.
    """

    def __init__(self, device: str, folder: Path, more: Sequence[str] = ()) -> None:
        self.device, self.folder, self._more = device, folder, tuple(more)
        self.scale = ON_CPU if device == "cpu" else Scale()
        self.tolerance = tolerance_of(self.scale.dtype)
        self._chance = random.Random(0)
        self._number = 0
        self._plain: tuple[str, LaunchedProcess, ExitStack] | None = None
        self._pair: tuple[PairKind, Pair, ExitStack] | None = None

    def model(self, name: str) -> Path:
        """Return the folder of a kind of model, which is written once."""
        folder = self.folder / "models" / f"{name}-{self.device}"
        if not (folder / "tokenizer.json").exists():
            write_random_model(folder, self.scale.settings(name))
        return folder

    def prompt(self, num_tokens: int) -> list[int]:
        """Return a prompt that no server has seen."""
        return self._chance.choices(TOKENS, k=num_tokens)

    def plain(self, model: str = "llama") -> LaunchedProcess:
        """Return the server without a connector that has this model."""
        if self._plain is None or self._plain[0] != model or not self._plain[1].is_running:
            self._end_plain()
            with ExitStack() as stack:
                launcher = stack.enter_context(Launcher(logs=self.folder))
                server = self._start(launcher, "plain", PairKind("", model=model), None)
                server.wait_ready(self.scale.start_s)
                self._plain = model, server, stack.pop_all()
        return self._plain[1]

    def pair(self, kind: PairKind) -> Pair:
        """Return a pair of this kind. A pair of another kind ends."""
        if self._pair is None or self._pair[0] != kind:
            self.end_pair()
            with ExitStack() as stack:
                launcher = stack.enter_context(Launcher(logs=self.folder))
                transfer = kind.transfer(self.device)
                prefill, decode = (
                    self._start(launcher, role, kind, transfer) for role in ("prefill", "decode")
                )
                launcher.wait_ready([prefill, decode], self.scale.start_s)
                self._pair = kind, Pair(prefill, decode, launcher), stack.pop_all()
        return self._pair[1]

    def _start(
        self, launcher: Launcher, role: str, kind: PairKind, transfer: Mapping[str, Any] | None
    ) -> LaunchedProcess:
        self._number += 1
        own = kind.prefill_arguments if role == "prefill" else ()
        words = [*self.scale.serve_arguments(kind.model), *self._more, *kind.arguments, *own]
        variables = {
            "VLLM_SERVER_DEV_MODE": "1",  # vLLM serves sleep and wake only then
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            **self.scale.environment,
        }
        if kind.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = kind.gpus[role == "decode"]
        model, name = str(self.model(kind.model)), f"{self._number:02}-{role}"
        return start_vllm(launcher, name, model, words, transfer, environment=variables)

    def logs(self) -> str:
        """Return the ends of the logs that were written last, also of servers that have ended."""
        found: list[str] = []
        for path in sorted(self.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)[-3:]:
            # vLLM's list of its routes is longer than what else it logs.
            lines = [line for line in path.read_text(errors="replace").splitlines() if " Route: " not in line]
            found += [f"-- {path.name}", *lines[-LOG_LINES:]]
        return "\n".join(found)

    def end_pair(self) -> None:
        if self._pair is not None:
            self._pair[2].close()
            self._pair = None

    def _end_plain(self) -> None:
        if self._plain is not None:
            self._plain[2].close()
            self._plain = None

    def close(self) -> None:
        """End all servers. Idempotent."""
        self.end_pair()
        self._end_plain()

    # -- asking --------------------------------------------------------------------------------------

    def compared(
        self, url: str, decode: LaunchedProcess, prompt: Sequence[int], model: str = "llama"
    ) -> Compared:
        """Ask a pair and the plain server the same. Nothing else may be in flight.

        Raises:
            WrongAnswerError: the answers differ by more than near-ties, or nothing was loaded.
        """
        (alone,) = self.ask(self.plain(model).url, [prompt])
        before = self.metrics(decode)
        (ours,) = self.ask(url, [prompt], decode=decode)
        num_loaded = int(self.metrics(decode).get(LOADED, 0.0) - before.get(LOADED, 0.0))
        if num_loaded == 0:
            raise WrongAnswerError(
                f"nothing of a prompt of {len(prompt)} tokens was loaded {ours.transfer_error}"
            )
        return Compared(ours, alone, num_loaded, self.near_ties(prompt, ours, alone, model))

    def near_ties(self, prompt: Sequence[int], ours: Answer, alone: Answer, model: str = "llama") -> int:
        """Return how many tokens of an answer are near-ties with the plain server's.

        Raises:
            WrongAnswerError: the answers differ in another way.
        """
        found = compare(
            prompt,
            ours.token_ids,
            alone.token_ids,
            ask_alone(self.plain(model).port, ignore_eos=True),
            tolerance=self.tolerance,
            logprobs=ours.logprobs,
            expected_logprobs=alone.logprobs,
        )
        if found.mismatch is not None:
            raise WrongAnswerError(f"the answer to a prompt of {len(prompt)} tokens has {found}")
        return len(found.near_ties)

    def ask(
        self,
        url: str,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 0,
        *,
        decode: LaunchedProcess | None = None,
        **fields: Any,
    ) -> list[Answer]:
        """Ask for answers to all prompts at once. With `decode`, they have the figures of their loads.

        Raises:
            BrokenAnswerError: an answer is not whole.
        """
        max_tokens = max_tokens or self.scale.answer_tokens
        asking = ask if decode is None else partial(ask_pair, decode=decode)

        async def gather() -> list[Answer]:
            async with aiohttp.ClientSession() as session:
                more = {"model": "model", **SCORES, **fields}
                return await asyncio.gather(
                    *(asking(session, url, prompt, max_tokens, **more) for prompt in prompts)
                )

        answers = asyncio.run(gather())
        for answer in answers:
            answer.require(max_tokens)
        return answers

    def metrics(self, *servers: LaunchedProcess) -> dict[str, float]:
        """Return the totals of servers' metrics, as soon as those of loads no longer change."""

        async def read() -> dict[str, float]:
            async with aiohttp.ClientSession() as session:
                return await settled(session, servers)

        return asyncio.run(read())


def itl_s(answer: Answer) -> float:
    """Return the median time between two parts of an answer."""
    return percentile(answer.gaps, 0.5)
