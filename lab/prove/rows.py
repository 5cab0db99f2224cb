"""The rows of the table: each is a fault, tried at several stages of a handoff."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from .client import PREEMPTIONS, Asking
from .forging import forged, malformed
from .lab import ANSWER_TOKENS, Lab, NotApplicableError, OfferError, Server
from .outcomes import Outcome, Verdict, judge_rest, worst

#: The column for what is found after everything has ended.
AFTERWARDS: Final = "afterwards"
#: What a stage means, for the table's legend, in the order of the columns.
STAGES: Final[Mapping[str, str]] = {
    "asked": "the decode server is asked with what the prefill server answered",
    "computing": "the fault hits while the prefill server computes the prompt",
    "offered": "the fault hits after the prefill server has answered; the decode server is asked during the fault",
    "loading": "the fault hits at a random moment of the first 40 ms after the decode server was asked",
    "answering": "the fault hits while the decode server's answer streams",
    "restarted": "the decode server is asked after the killed server runs again at the same port, with what was answered before",
    "restored": "the decode server is asked after the fault has been undone, without a restart",
    "bystanders": "other requests on the node that did not fail, in flight during the fault",
    AFTERWARDS: "no request is left: the servers run, their pools are empty, and a new handoff succeeds",
}
LOADING_S: Final = 0.04
COMPUTING_S: Final = 0.06
LONG_PROMPT: Final = 1500
LONG_ANSWER: Final = 300
FREEZE_SHORT_S: Final = 0.7
#: Beyond the lease. The presets' other timeouts are shorter.
FREEZE_BEYOND_S: Final = 4.0

Verdicts = dict[str, Verdict]


@dataclass(frozen=True)
class Row:
    """A fault.

    Attributes:
        stages: The columns that it has a cell in, beside `AFTERWARDS`.
        run: Does it once for some of its stages. Returns a verdict for each.
        needs_params: It changes `kv_transfer_params`, so the connector must have some.
        has_afterwards: Whether the servers are looked at after it. If not, it did that itself.
        is_slow: It restarts a server or waits for timeouts.
    """

    name: str
    about: str
    stages: tuple[str, ...]
    run: Callable[[Lab, Collection[str]], Verdicts]
    needs_params: bool = False
    has_afterwards: bool = True
    is_slow: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.stages, *((AFTERWARDS,) if self.has_afterwards else ()))


# -- without a fault -----------------------------------------------------------------------------------


def _none(lab: Lab, stages: Collection[str]) -> Verdicts:
    return {"asked": lab.hand_over(lab.prompt())}


def _small_pool(lab: Lab, stages: Collection[str]) -> Verdicts:
    """More requests at once than the pool has blocks for, so that the decode server preempts some of them."""
    (before,) = lab.decode.client.metrics(PREEMPTIONS)
    prompts = [lab.prompt() for _ in range(8)]
    for prompt in prompts:
        lab.expected(prompt, LONG_ANSWER)

    def one(prompt: list[int]) -> Verdict:
        request_id = lab.request_id()
        try:
            params = lab.offer(prompt, request_id)
        except OfferError as error:
            return Verdict(
                Outcome.HANG if error.reply.is_late else Outcome.ERROR, f"the prefill server: {error}"
            )
        reply = lab.decode.client.ask(prompt, LONG_ANSWER, request_id, params)
        return lab.judge(reply, prompt, LONG_ANSWER)

    with ThreadPoolExecutor(len(prompts)) as threads:
        verdicts = list(threads.map(one, prompts))
    (after,) = lab.decode.client.metrics(PREEMPTIONS)
    found = _worst(verdicts)
    note = f"{after - before:.0f} preemptions"
    return {
        "asked": Verdict(found.outcome, f"{found.why}; {note}" if found.why else note, None, found.near_ties)
    }


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    outcome = worst([each.outcome for each in verdicts])
    return next(each for each in verdicts if each.outcome is outcome)


# -- processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Flight:
    """Requests in flight at several stages, to be judged after the fault."""

    lab: Lab
    asked: dict[str, tuple[Asking, list[int], int]]

    def verdicts(self) -> Verdicts:
        return {
            stage: self.lab.judge_offer(asking.reply(), prompt)
            if stage == "computing"
            else self.lab.judge(asking.reply(), prompt, max_tokens)
            for stage, (asking, prompt, max_tokens) in self.asked.items()
        }


def _take_off(lab: Lab, stages: Collection[str]) -> tuple[_Flight, dict[str, tuple[list[int], str, Any]]]:
    """Bring one request to each stage, at the latest at the same moment.

    Returns also the offers that nothing has asked for.
    """
    wanted = [stage for stage in ("answering", "loading", "offered", "restarted") if stage in stages]
    prompts = {stage: lab.prompt() for stage in wanted}
    long_prompt = lab.prompt(LONG_PROMPT)
    # The single server shares the machine. So it answers before the first offer, whose lease would otherwise
    # run meanwhile, and not at the moment of the fault.
    for stage, prompt in prompts.items():
        lab.expected(prompt, LONG_ANSWER if stage == "answering" else ANSWER_TOKENS)
    if "computing" in stages:
        lab.expected(long_prompt, 1)
    flight, offers = _Flight(lab, {}), {}
    for stage, prompt in prompts.items():
        request_id = lab.request_id()
        offers[stage] = prompt, request_id, lab.offer(prompt, request_id)
    if "answering" in stages:
        prompt, request_id, params = offers.pop("answering")
        asking = lab.decode.client.start(prompt, LONG_ANSWER, request_id, params, stream=True)
        asking.first_token.wait(lab.settings.deadline_s)
        flight.asked["answering"] = asking, prompt, LONG_ANSWER
    if "computing" in stages:
        flight.asked["computing"] = lab.start_offer(long_prompt, lab.request_id()), long_prompt, 1
    if "loading" in stages:
        prompt, request_id, params = offers.pop("loading")
        asking = lab.decode.client.start(prompt, ANSWER_TOKENS, request_id, params)
        flight.asked["loading"] = asking, prompt, ANSWER_TOKENS
        asking.sent.wait(lab.settings.deadline_s)
    lab.moment(LOADING_S if "loading" in stages else COMPUTING_S)
    return flight, offers


def _ask_offered(lab: Lab, flight: _Flight, offers: Mapping[str, tuple[list[int], str, Any]]) -> None:
    if "offered" in offers:
        prompt, request_id, params = offers["offered"]
        asking = lab.decode.client.start(prompt, ANSWER_TOKENS, request_id, params)
        flight.asked["offered"] = asking, prompt, ANSWER_TOKENS


def _kill_prefill(lab: Lab, stages: Collection[str]) -> Verdicts:
    flight, offers = _take_off(lab, stages)
    lab.prefill.process.kill()
    _ask_offered(lab, flight, offers)
    found = flight.verdicts()
    lab.restart(lab.prefill)
    if "restarted" in offers:
        prompt, request_id, params = offers["restarted"]
        found["restarted"] = lab.ask_loading(prompt, params, request_id)
    return found


def _kill_decode(lab: Lab, stages: Collection[str]) -> Verdicts:
    flight, offers = _take_off(lab, stages)
    lab.decode.process.kill()
    found = flight.verdicts()
    lab.restart(lab.decode)
    if "restarted" in offers:
        prompt, request_id, params = offers["restarted"]
        found["restarted"] = lab.ask_loading(prompt, params, request_id)
    return found


def _freeze_prefill(seconds_of: Callable[[Lab], float]) -> Callable[[Lab, Collection[str]], Verdicts]:
    def run(lab: Lab, stages: Collection[str]) -> Verdicts:
        flight, offers = _take_off(lab, stages)
        lab.prefill.process.freeze()
        try:
            _ask_offered(lab, flight, offers)
            until = time.monotonic() + seconds_of(lab)
            if "bystanders" in stages:
                # They take the blocks that a failed load has given back. Bytes that arrive late would hit
                # them.
                time.sleep(max(0.0, until - time.monotonic() - 0.5))
                prompt = lab.prompt()
                lab.expected(prompt, LONG_ANSWER)
                asking = lab.decode.client.start(prompt, LONG_ANSWER, lab.request_id(), stream=True)
                flight.asked["bystanders"] = asking, prompt, LONG_ANSWER
            time.sleep(max(0.0, until - time.monotonic()))
        finally:
            lab.prefill.process.thaw()
        return flight.verdicts()

    return run


def _freeze_decode(seconds_of: Callable[[Lab], float]) -> Callable[[Lab, Collection[str]], Verdicts]:
    def run(lab: Lab, stages: Collection[str]) -> Verdicts:
        flight, _ = _take_off(lab, stages)
        lab.decode.process.freeze()
        others: list[tuple[list[int], Any]] = []
        try:
            until = time.monotonic() + seconds_of(lab)
            if "bystanders" in stages:
                # The lease ends meanwhile, and other prompts take the blocks that the frozen server was
                # reading.
                time.sleep(max(0.0, until - time.monotonic() - 1.0))
                others = lab.overwrite(lab.prefill)
            time.sleep(max(0.0, until - time.monotonic()))
        finally:
            lab.decode.process.thaw()
        found = flight.verdicts()
        if others:
            found["bystanders"] = _worst([lab.judge_offer(reply, prompt) for prompt, reply in others])
        return found

    return run


def _short(lab: Lab) -> float:
    return FREEZE_SHORT_S


def _beyond(lab: Lab) -> float:
    return lab.settings.connector.lease_s + FREEZE_BEYOND_S


# -- parameters --------------------------------------------------------------------------------------


def _reused(lab: Lab, stages: Collection[str]) -> Verdicts:
    """Ask again with the params of an answer that is over, when its blocks hold other prompts."""
    prompt, request_id = lab.prompt(), lab.request_id()
    params = lab.offer(prompt, request_id)
    first = lab.ask_loading(prompt, params, request_id)
    if first.outcome is not Outcome.RIGHT:
        return {"asked": first}
    lab.overwrite(lab.prefill)
    lab.overwrite(lab.decode)  # it would answer from its own prefix cache
    return {"asked": lab.ask_loading(prompt, params, lab.request_id())}


def _stale_for_another(lab: Lab, stages: Collection[str]) -> Verdicts:
    """Ask for one prompt with the used-up params of another one of the same length."""
    prompt, other, request_id = lab.prompt(), lab.prompt(), lab.request_id()
    params = lab.offer(prompt, request_id)
    first = lab.ask_loading(prompt, params, request_id)
    if first.outcome is not Outcome.RIGHT:
        return {"asked": first}
    if lab.settings.connector.encodes:
        params = _as_if_of(lab.offer(other, lab.request_id()), params)
    return {"asked": lab.ask_loading(other, params, lab.request_id())}


def _as_if_of(right: Any, wrong: Any) -> Any:
    """Return the params of other images under the ids of the right ones: a decode server looks for those."""
    return dict(zip(right, wrong.values(), strict=False))


def _swapped(lab: Lab, stages: Collection[str]) -> Verdicts:
    """Two prompts of the same length, each with the params of the other one."""
    prompts, ids = (lab.prompt(), lab.prompt()), (lab.request_id(), lab.request_id())
    params = [lab.offer(prompt, request_id) for prompt, request_id in zip(prompts, ids, strict=True)]
    if lab.settings.connector.encodes:
        params = [_as_if_of(other, own) for own, other in zip(params, reversed(params), strict=True)]
    verdicts = [
        lab.ask_loading(prompt, theirs, request_id)
        for prompt, theirs, request_id in zip(prompts, reversed(params), ids, strict=True)
    ]
    return {"asked": _worst(verdicts)}


def _expired(lab: Lab, stages: Collection[str]) -> Verdicts:
    """Ask when the lease is over and the blocks hold other prompts."""
    prompt, request_id = lab.prompt(), lab.request_id()
    params = lab.offer(prompt, request_id)
    lab.wait_for_pool(lab.prefill, lab.settings.connector.lease_s + 10.0)
    lab.overwrite(lab.prefill)
    return {"asked": lab.ask_loading(prompt, params, request_id)}


def _changed_by(change: Callable[[Lab, Any], tuple[Any, str]]) -> Callable[[Lab, Collection[str]], Verdicts]:
    def run(lab: Lab, stages: Collection[str]) -> Verdicts:
        prompt, request_id = lab.prompt(), lab.request_id()
        params, what = change(lab, lab.offer(prompt, request_id))
        found = lab.ask_loading(prompt, params, request_id)
        why = f"{found.why}; {what}" if found.why else what
        return {"asked": Verdict(found.outcome, why, found.loaded, found.near_ties, found.seconds)}

    return run


# -- clients, models and salts -------------------------------------------------------------------------


def _leave(lab: Lab, stages: Collection[str]) -> Verdicts:
    """The client leaves; what counts is what is found afterwards, so each stage is looked at by itself."""
    found = {}
    for stage in stages:
        request_id = lab.request_id()
        if stage == "computing":
            asking = lab.start_offer(lab.prompt(LONG_PROMPT), request_id)
            asking.sent.wait(lab.settings.deadline_s)
            lab.moment(COMPUTING_S)
            asking.leave()
        else:
            prompt = lab.prompt()
            params = lab.offer(prompt, request_id)
            if stage != "offered":
                asking = lab.decode.client.start(prompt, LONG_ANSWER, request_id, params, stream=True)
                asking.sent.wait(lab.settings.deadline_s)
                if stage == "answering":
                    asking.first_token.wait(lab.settings.deadline_s)
                lab.moment(LOADING_S)
                asking.leave()
        found[stage] = judge_rest_of(lab)
        if found[stage].outcome is Outcome.DEAD:
            break  # the stages after it would be blamed for it
    return found


def judge_rest_of(lab: Lab) -> Verdict:
    """Look at the servers after a fault, and judge what is found. One that cannot even be asked is dead."""
    try:
        return judge_rest(lab.rest())
    except OSError as error:
        return Verdict(Outcome.DEAD, str(error))


def _other_weights(lab: Lab, stages: Collection[str]) -> Verdicts:
    prompt, request_id = lab.prompt(), lab.request_id()
    return {"asked": lab.ask_loading(prompt, lab.offer(prompt, request_id, lab.stranger), request_id)}


def _weights_in_memory(lab: Lab, stages: Collection[str]) -> Verdicts:
    """Load other weights into the running prefill server, as a training loop does, and the right ones again
    later.
    """
    found = {}
    try:
        _reload(lab.prefill, str(lab.other_model))
        if not lab.settings.connector.encodes:  # an encoder answers with no token
            probe = lab.prompt()
            reply = lab.prefill.client.ask(probe, ANSWER_TOKENS, lab.request_id())
            if lab.judge(reply, probe).outcome is not Outcome.WRONG:
                raise NotApplicableError("reload_weights changed no answer of the prefill server")
        found["asked"] = _without_params(lab)
        _reload(lab.prefill, lab.settings.model)
        found["restored"] = _without_params(lab)
    except OSError as error:
        raise NotApplicableError(
            f"needs a prefill server with VLLM_SERVER_DEV_MODE=1 whose weights can be reloaded: {error}"
        ) from error
    finally:
        if lab.prefill.launched is not None:
            lab.restart(lab.prefill)
        else:
            with contextlib.suppress(OSError):
                _reload(lab.prefill, lab.settings.model)
    return found


def _without_params(lab: Lab) -> Verdict:
    """Hand a prompt over. If the prefill server hands nothing over, ask as a router does: without params."""
    prompt, request_id = lab.prompt(), lab.request_id()
    try:
        params = lab.offer(prompt, request_id)
    except OfferError as error:
        if not error.reply.is_whole:
            return Verdict(Outcome.ERROR, f"the prefill server: {error}")
        params = None
    return lab.ask_loading(prompt, params, request_id)


def _reload(server: Server, model: str) -> None:
    order = {"method": "reload_weights", "kwargs": {"weights_path": model}}
    server.client.post("/collective_rpc", order)
    until = time.monotonic() + 20.0
    # A reset fails while blocks are in use, also by offers.
    while not json.loads(server.client.post("/reset_prefix_cache") or "{}").get("success", True):
        if time.monotonic() > until:
            raise OSError("the prefix cache could not be reset")
        time.sleep(0.2)


def _other_salt(lab: Lab, stages: Collection[str]) -> Verdicts:
    """The prompt of one tenant, asked for by another one with the params of the first."""
    prompt, request_id = lab.prompt(), lab.request_id()
    params = lab.offer(prompt, request_id, salt="tenant-one")
    return {"asked": lab.ask_loading(prompt, params, request_id, salt="tenant-two")}


# -- a router in front ---------------------------------------------------------------------------------


def _ask_router(lab: Lab, max_tokens: int) -> list[tuple[Asking, list[int]]]:
    """Ask four prompts at once."""
    prompts = [lab.prompt() for _ in range(4)]
    for prompt in prompts:
        lab.expected(prompt, max_tokens)
    return [
        (lab.router.start(prompt, max_tokens, lab.request_id(), stream=True), prompt) for prompt in prompts
    ]


def _router(lab: Lab, stages: Collection[str]) -> Verdicts:
    asked = _ask_router(lab, ANSWER_TOKENS)
    return {"asked": _worst([lab.judge(asking.reply(), prompt) for asking, prompt in asked])}


def _router_leave(lab: Lab, stages: Collection[str]) -> Verdicts:
    asked = _ask_router(lab, LONG_ANSWER)
    asked[0][0].first_token.wait(lab.settings.deadline_s)
    for asking, _ in asked[1:]:
        lab.moment(LOADING_S)
        asking.leave()
    asking, prompt = asked[0]
    return {"bystanders": lab.judge(asking.reply(), prompt, LONG_ANSWER)}


def _router_kill_prefill(lab: Lab, stages: Collection[str]) -> Verdicts:
    asked = _ask_router(lab, ANSWER_TOKENS)
    lab.moment(COMPUTING_S)
    lab.prefill.process.kill()
    found = _worst([lab.judge(asking.reply(), prompt) for asking, prompt in asked])
    lab.restart(lab.prefill)
    return {"asked": found}


ROWS: Final[Mapping[str, Row]] = {
    row.name: row
    for row in (
        Row("none", "no fault: one handoff", ("asked",), _none),
        Row(
            "reused",
            "the params of an answer that is over, for the same prompt again, after other prompts took the blocks",
            ("asked",),
            _reused,
            needs_params=True,
        ),
        Row(
            "used-for-another",
            "the params of an answer that is over, for another prompt of the same length",
            ("asked",),
            _stale_for_another,
            needs_params=True,
        ),
        Row(
            "swapped",
            "two prompts of the same length, each with the params of the other",
            ("asked",),
            _swapped,
            needs_params=True,
        ),
        Row(
            "expired",
            "the params of an offer whose lease is over, after other prompts took the blocks",
            ("asked",),
            _expired,
            needs_params=True,
            is_slow=True,
        ),
        Row(
            "forged",
            "one value of the params replaced by another one of its type",
            ("asked",),
            _changed_by(lambda lab, params: forged(params, lab.chance)),
            needs_params=True,
        ),
        Row(
            "malformed",
            "one value of the params missing or of another type",
            ("asked",),
            _changed_by(lambda lab, params: malformed(params, lab.chance)),
            needs_params=True,
        ),
        Row(
            "leave",
            "the client closes its connection and asks nothing more",
            ("computing", "offered", "loading", "answering"),
            _leave,
            has_afterwards=False,
        ),
        Row("small-pool", "8 long answers at once, more than the pool holds", ("asked",), _small_pool),
        Row(
            "other-salt",
            "a cache salt on the decode server that the prefill server was not given",
            ("asked",),
            _other_salt,
        ),
        Row(
            "other-weights",
            "a prefill server whose model has the same name and other weights",
            ("asked",),
            _other_weights,
        ),
        Row(
            "weights-in-memory",
            "other weights loaded into the running prefill server with reload_weights, and then the right ones",
            ("asked", "restored"),
            _weights_in_memory,
            is_slow=True,
        ),
        Row(
            "freeze-prefill",
            f"the prefill server stopped for {FREEZE_SHORT_S:g} s",
            ("computing", "offered", "loading", "answering"),
            _freeze_prefill(_short),
        ),
        Row(
            "freeze-prefill-beyond",
            f"the prefill server stopped for {FREEZE_BEYOND_S:g} s longer than its lease",
            ("computing", "offered", "loading", "answering", "bystanders"),
            _freeze_prefill(_beyond),
            is_slow=True,
        ),
        Row(
            "freeze-decode",
            f"the decode server stopped for {FREEZE_SHORT_S:g} s",
            ("loading", "answering"),
            _freeze_decode(_short),
        ),
        Row(
            "freeze-decode-beyond",
            f"the decode server stopped for {FREEZE_BEYOND_S:g} s longer than the lease; other prompts take the blocks meanwhile",
            ("loading", "answering", "bystanders"),
            _freeze_decode(_beyond),
            is_slow=True,
        ),
        Row(
            "kill-prefill",
            "kill -9 of the prefill server, and a restart at the same ports",
            ("computing", "offered", "loading", "answering", "restarted"),
            _kill_prefill,
            is_slow=True,
        ),
        Row(
            "kill-decode",
            "kill -9 of the decode server, and a restart at the same ports",
            ("loading", "answering", "restarted"),
            _kill_decode,
            is_slow=True,
        ),
        Row("router", "a router in front, 4 requests at once, and no fault", ("asked",), _router),
        Row(
            "router-leave",
            "a router in front: 3 of 4 clients leave, and the fourth stays",
            ("bystanders",),
            _router_leave,
        ),
        Row(
            "router-kill-prefill",
            "a router in front: kill -9 of the prefill server under 4 requests",
            ("asked",),
            _router_kill_prefill,
            is_slow=True,
        ),
    )
}
