"""Where a prompt is computed: the arithmetic on made-up fleets, and what the router makes of it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from kvferry.connector.spans import RecentSpans
from kvferry.router.choice import placement
from kvferry.router.choice.estimates import WEIGHT, Line, Rate, chance_of_more
from kvferry.router.choice.fleet import Fleet, Progress
from kvferry.router.choice.placement import Ask, Choice, Limits, NodeLoad, Work, choose
from kvferry.router.choice.prefixes import PIECE_TOKENS, Prefixes, keys_of
from tests.support.fake_nodes import routed
from tests.support.patience import DEADLINE_S

NO_LIMITS = Limits()


def handover(prefill: NodeLoad, decode: NodeLoad) -> Rate:
    return Rate(2e-5, 256)


def nodes(num: int) -> list[NodeLoad]:
    return [NodeLoad(f"http://node-{number}") for number in range(num)]


def compute(load: NodeLoad, num_tokens: int) -> None:
    """Give a node a prompt to compute, whose answer is given elsewhere."""
    ask_prompt(load, Work(num_tokens, 0.0))


def ask_prompt(load: NodeLoad, prompt: Work) -> None:
    load.prompt_asked(prompt, prompt.num_tokens, num_steps=64)


def answer(load: NodeLoad, num: int, spare_s: float = 1e9) -> None:
    """Let a node give answers that may come so much later."""
    for _ in range(num):
        load.answers[Work(0, 0.0, spare_s)] = None


def chosen(ask: Ask, loads: list[NodeLoad], limits: Limits = NO_LIMITS, **modes: bool) -> Choice:
    choice = choose(ask, loads, loads, handover, limits, **modes)
    assert choice is not None
    return choice


# -- the choice --------------------------------------------------------------------------------------


def test_an_idle_node_does_all_of_a_request() -> None:
    assert chosen(Ask(1000, 64), nodes(2)).is_local


def test_a_request_goes_to_the_node_with_less_to_do() -> None:
    busy, idle = loads = nodes(2)
    compute(busy, 5000)
    assert chosen(Ask(20, 64), loads).decode is idle
    assert chosen(Ask(20, 64), loads).is_local


@pytest.mark.parametrize(("num_running", "num_waiting"), [(0, 3), (8, 0)])
def test_a_request_goes_to_the_node_with_less_to_do_for_other_routers(
    num_running: int, num_waiting: int
) -> None:
    busy, idle = loads = nodes(2)
    compute(idle, 20)
    busy.note_all(num_running, num_waiting)
    idle.note_all(1, 0)
    assert chosen(Ask(20, 64), loads).decode is idle
    busy.note_all(0, 0)
    assert chosen(Ask(20, 64), loads).decode is busy


def test_requests_that_came_or_ended_during_a_check_are_no_other_routers() -> None:
    (load,) = nodes(1)
    prompt = Work(20, 0.0)
    ask_prompt(load, prompt)
    load.prompt_ended(prompt, 0.1, is_computed=True)
    load.note_all(1, 0)
    assert load.num_answers == 0
    load.note_all(1, 0)
    assert load.num_answers == 1


def test_an_answer_that_waits_for_its_prompt_in_a_rendezvous_is_no_other_routers() -> None:
    (load,) = nodes(1)
    load.coming[Work(0, 1.0)] = None
    load.note_all(0, 1)
    assert load.num_other_prompts == load.num_answers == 0


def test_a_long_prompt_keeps_away_from_answers_that_it_would_hold_up() -> None:
    answering, computing = loads = nodes(2)
    answer(answering, 3)
    compute(computing, 200)
    assert chosen(Ask(4000, 8), loads).prefill is computing


def test_a_prompt_goes_where_it_makes_no_answer_late() -> None:
    one, other = loads = nodes(2)
    answer(one, 1, spare_s=0.3)
    answer(other, 2)  # more of them pause, but they can wait
    choice = chosen(Ask(1000, 8), loads)
    assert (choice.prefill, choice.num_late) == (other, 0)
    # The answer of a prompt that waits for its turn is held up as well.
    for load in loads:
        load.answers.clear()
    ask_prompt(one, Work(300, 0.0, spare_s=0.3))
    compute(other, 600)
    assert chosen(Ask(1000, 8), loads).prefill is other
    assert chosen(Ask(1000, 8), [one]).score >= 1 - WEIGHT


def test_a_request_that_is_late_anywhere_makes_no_other_one_late() -> None:
    one, other = loads = nodes(2)
    compute(one, 6000)
    compute(other, 5000)
    assert chosen(Ask(1000, 8), loads).prefill is one
    compute(one, 50_000)  # but it does not wait for ever
    assert chosen(Ask(1000, 8), loads).prefill is other


def test_a_prompt_keeps_away_from_an_answer_that_a_node_will_give_after_a_handover() -> None:
    loads = nodes(2)
    first = chosen(Ask(400, 8), loads).prefill
    # The cache comes in a moment, and the answer may be late by little.
    first.coming[Work(0, 0.1, spare_s=0.2)] = None
    assert chosen(Ask(400, 8), loads).prefill is not first
    assert first.num_delayed(0.4, now=0.0) > 0.5
    first.coming.clear()
    # Long before it comes, the prompt is computed.
    first.coming[Work(0, 10.0, spare_s=0.2)] = None
    assert first.num_delayed(0.4, now=0.0) == 0


def test_a_prompt_that_is_computed_for_a_while_is_waited_for_that_much_less() -> None:
    (node,) = nodes(1)
    compute(node, 500)
    compute(node, 500)
    queue_s = node.wait_s(0.0)
    assert node.wait_s(0.1) == pytest.approx(queue_s - 0.1)
    assert node.wait_s(1e6) == pytest.approx(queue_s / 2)


def test_an_answer_is_given_where_fewer_prompts_come() -> None:
    """Roles come about by themselves: a prompt that comes later would hold up the answer of this one."""
    computing, answering = loads = nodes(2)
    for at in range(20):
        prompt = Work(1000, float(at))
        ask_prompt(computing, prompt)
        computing.prompt_ended(prompt, at + 0.9, is_computed=True)
    answer(answering, 3, spare_s=0.5)
    ask = Ask(1000, 8)
    choice = choose(ask, loads, loads, handover, NO_LIMITS, now=20.0)
    assert choice is not None
    assert (choice.prefill, choice.decode) == (computing, answering)
    later = choose(ask, loads, loads, handover, NO_LIMITS, now=200.0)
    assert later is not None
    assert (later.prefill, later.decode) == (computing, computing)


@pytest.mark.parametrize("mean", [0.0, 0.3, 2.0, 19.0, 1e6])
def test_how_likely_more_prompts_come_than_an_answer_can_wait_for(mean: float) -> None:
    chances = [chance_of_more(mean, number) for number in (0, 0.9, 1, 3, 30, 1e9)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == pytest.approx(1 - math.exp(-mean))
    assert chances[-1] == 0


def test_what_is_cached_need_not_be_computed() -> None:
    first, second = loads = nodes(2)
    choice = chosen(Ask(4000, 16, {second.url: 3900}), loads)
    assert (choice.prefill, choice.is_local) == (second, True)
    assert choice.ttft_s < 0.3
    compute(first, 100)
    assert chosen(Ask(4000, 16, {second.url: 3900}), loads).prefill is second


def test_a_prompt_is_handed_over_from_the_node_that_has_it_to_one_that_is_free() -> None:
    full, free = loads = nodes(2)
    answer(full, 6)
    for _ in range(50):  # each answer slows all others down
        for number in (1, 7):
            full.step.add(number, 0.02 * number)
            free.step.add(number, 0.02 * number)
    choice = chosen(Ask(4000, 20, {full.url: 3990}), loads)
    assert (choice.prefill, choice.decode) == (full, free)


def test_limits_come_before_the_sum_of_times() -> None:
    one, other = loads = nodes(2)
    compute(one, 900)
    ask = Ask(300, 8, {one.url: 290})
    assert chosen(ask, loads, Limits(ttft_s=30.0)).prefill is other
    compute(other, 1000)
    assert chosen(ask, loads, Limits(ttft_s=30.0)).prefill is one
    assert chosen(ask, loads, Limits(ttft_s=1.2)).prefill is one


@pytest.mark.parametrize("seconds", [1e-9, 1e-3, 1e9])
def test_limits_that_no_node_or_every_node_keeps_do_not_matter(seconds: float) -> None:
    one, other = loads = nodes(2)
    compute(one, 20_000)
    assert chosen(Ask(300, 8), loads, Limits(seconds, seconds)).prefill is other


def test_a_mode_leaves_one_way() -> None:
    loads = nodes(2)
    assert chosen(Ask(100, 10), loads, may_hand_over=False).is_local
    assert not chosen(Ask(100, 10), loads, may_be_local=False).is_local
    assert choose(Ask(100), loads[:1], loads[:1], handover, NO_LIMITS, may_be_local=False) is None


def test_a_node_for_prompts_alone_has_them_beside_kept_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, kept, other, third = nodes(4)
    choice = choose(Ask(100), [alone], [kept], handover, NO_LIMITS)
    assert (choice and (choice.prefill, choice.decode)) == (alone, kept)
    monkeypatch.setattr(placement, "keep_for_prompts", lambda nodes, num: {kept})
    for load in (kept, other, third):
        compute(load, 4000)
    choice = choose(Ask(1000, 64), [alone, kept, other, third], [kept, other, third], handover, NO_LIMITS)
    assert (choice and choice.prefill) is alone


def test_a_choice_says_what_the_other_way_would_cost() -> None:
    choice = chosen(Ask(1000, 64), nodes(2))
    assert choice.total_s < choice.alternative_s < math.inf
    more_s = choice.alternative_s - choice.total_s
    assert str(choice) == (
        f"local: a handover would take {more_s * 1e3:.0f} ms more in all; first token 1027 ms, others delayed 0.0 ms, "
        "0.00 requests late"
    )


@pytest.mark.parametrize(
    ("alternative_s", "verdict"),
    [
        (2.5, "handover: local would take 1500 ms more in all; "),
        (0.75, "handover: keeps the limits better than local, which would take 250 ms less in all; "),
        (math.inf, "handover: the only way; "),
    ],
)
def test_a_choice_says_in_words_why_it_was_made(alternative_s: float, verdict: str) -> None:
    prefill, decode = nodes(2)
    choice = Choice(prefill, decode, 0.412, 0.0095, 0.125, 1.0, 1.0, 0.0, 0.0, alternative_s)
    assert str(choice) == f"{verdict}first token 412 ms, others delayed 9.5 ms, 0.12 requests late"


# -- what is learned ---------------------------------------------------------------------------------


def test_a_node_is_as_fast_as_it_was_lately() -> None:
    load = NodeLoad("http://node")
    now = 0.0
    for seconds in (0.1, 4.0):
        for _ in range(100):
            prompt = Work(1000, now)
            ask_prompt(load, prompt)
            now += seconds
            load.prompt_ended(prompt, now, is_computed=True)
        assert load.prompt.at(1000) == pytest.approx(seconds, rel=0.2)


def test_the_wait_behind_another_prompt_is_not_taken_for_computing() -> None:
    load = NodeLoad("http://node")
    for round_ in range(40):
        began = 10.0 * round_
        prompts = [Work(1000, began) for _ in range(4)]
        for prompt in prompts:
            ask_prompt(load, prompt)
        for place, prompt in enumerate(prompts, 1):
            load.prompt_ended(prompt, began + place, is_computed=True)
    assert load.prompt.at(1000) == pytest.approx(1.0, rel=0.01)
    assert load.queue_s == 0


def test_a_prompt_has_a_fixed_cost_beside_that_of_its_tokens() -> None:
    load = NodeLoad("http://node")
    for number in range(200):
        load.prompt.add(8, 0.05)
        load.prompt.add(100 + number, 0.05 + 0.002 * (92 + number))
    assert load.prompt.at(8) == pytest.approx(0.05, rel=0.05)
    for num_tokens in (8, 8, 200):
        compute(load, num_tokens)
    assert load.queue_s == pytest.approx(2 * load.prompt.at(8) + load.prompt.at(200))


def test_a_step_during_a_prompt_says_nothing_about_steps() -> None:
    load, given = NodeLoad("http://node"), Work(0, 0.0, 10.0)
    load.answers[given] = None
    before = load.step.at(1)
    prompt = Work(100, 0.0)
    ask_prompt(load, prompt)
    load.tokens_came(given, 5.0, 1)
    assert load.step.at(1) == before
    assert given.spare_s == pytest.approx(5.0 + before)  # but the answer has less time left
    load.prompt_ended(prompt, 6.0, is_computed=False)
    load.tokens_came(given, 10.0, 1)
    assert load.step.at(1) > before


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -5.0, 1e300, 0.0])
def test_no_measurement_makes_an_estimate_absurd(seconds: float) -> None:
    """Clocks that jump, and nodes that lie about time, cost accuracy at most."""
    rate, line = Rate(1e-3, 64), Line(((1, 0.03), (8, 0.06)), 4)
    for _ in range(500):
        rate.add(seconds, 10)
        line.add(3, seconds)
    assert 0 < rate.seconds <= 600
    assert all(0 < line.at(x) < math.inf for x in (0, 1, 3, 1000))
    for _ in range(400):
        rate.add(0.02, 10)
        line.add(3, 0.05)
    assert rate.seconds == pytest.approx(2e-3, rel=0.3)


def test_more_answers_never_take_less_time() -> None:
    line = Line(((1, 0.03), (8, 0.06)), 4)
    for _ in range(100):
        line.add(1, 0.5)
        line.add(8, 0.1)
    assert line.at(8) >= line.at(1)


# -- what nodes have cached --------------------------------------------------------------------------


def test_a_node_has_what_was_sent_there_up_to_where_prompts_differ() -> None:
    prefixes = Prefixes()
    tokens = list(range(10 * PIECE_TOKENS))
    prefixes.add(keys_of({"prompt": tokens}), "a")
    prefixes.add(keys_of({"prompt": tokens[: 4 * PIECE_TOKENS]}), "b")
    other = [*tokens[: 5 * PIECE_TOKENS], *(tokens[0] for _ in tokens[5 * PIECE_TOKENS :])]
    assert prefixes.shares(keys_of({"prompt": other})) == {"a": 0.5, "b": 0.4}
    assert prefixes.shares(keys_of({"prompt": tokens, "cache_salt": "s"})) == {}
    assert prefixes.shares(keys_of({"prompt": tokens, "model": "adapter"})) == {}
    assert prefixes.shares([]) == {}
    prefixes.forget("a")
    assert prefixes.shares(keys_of({"prompt": tokens})) == {"b": 0.4}
    prefixes.add(keys_of({"prompt": tokens[:PIECE_TOKENS]}), "a")  # a new process has what it was sent since
    assert prefixes.shares(keys_of({"prompt": tokens})) == {"a": 0.1, "b": 0.4}


def test_a_conversation_begins_with_its_earlier_turns() -> None:
    first = [{"role": "user", "content": "x" * 300}]
    later = [*first, {"role": "assistant", "content": "y" * 100}, {"role": "user", "content": "z" * 100}]
    prefixes = Prefixes()
    prefixes.add(keys_of({"messages": first}), "a")
    assert 0.4 < prefixes.shares(keys_of({"messages": later}))["a"] < 0.7


def test_the_index_is_bounded_and_keeps_what_was_used_last() -> None:
    prefixes = Prefixes(max_keys=100)
    for number in range(1000):
        prefixes.add([1, 2, 3], "kept")
        prefixes.add([1000 + number], f"node-{number % 7}")
    assert len(prefixes) == 100
    assert prefixes.shares([1, 2, 3]) == {"kept": 1.0}
    for number in range(5000):  # nodes that come and go
        prefixes.add([7], f"node-{number}")
    assert len(prefixes.shares([7])) <= 1024


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [1.5], ["a", 7], [[1], [2]], [1 << 70], ["\ud800"], ""], ids=str
)
def test_a_malformed_prompt_has_no_pieces(prompt: Any) -> None:
    assert keys_of({"prompt": prompt}) == []


# -- the fleet ---------------------------------------------------------------------------------------


def test_a_request_leaves_nothing_behind_and_an_ended_process_is_forgotten() -> None:
    now = [0.0]
    fleet = Fleet("always", NO_LIMITS, lambda: now[0])
    for step in range(200):
        progress = Progress(fleet, {"prompt": list(range(40)), "max_tokens": 4})
        choice = fleet.choose(progress, {"a": 0, "b": 0}, {"a": 0, "b": 0})
        assert choice is not None
        progress.prompt_asked(choice.prefill.url)
        (coming,) = choice.decode.coming
        assert coming.spare_s == choice.slack_s  # its first token is what a prompt there would delay
        if step % 5 == 0:
            progress.prompt_asked("a")
        now[0] += 0.01
        if step % 3 == 0:
            progress.prompt_ended(is_computed=True)
            progress.answer_began("b")
            progress.tokens_came(1)
        progress.ended()
        progress.ended()
    for url in "ab":
        load = fleet.load(url)
        assert (load.queue_s, load.prompts, load.answers, load.coming) == (0, {}, {}, {})
    assert fleet.prefixes.shares(keys_of({"prompt": list(range(40))})) == {"a": 1.0, "b": 1.0}
    before = fleet.load("a")
    fleet.forget("a")
    assert fleet.load("a") is not before
    assert fleet.prefixes.shares(keys_of({"prompt": list(range(40))})) == {"b": 1.0}


@pytest.mark.parametrize(
    "limit", [0, 1, -1, 10**9, pytest.param(10**400, id="too large for a float"), True, "many", None]
)
def test_any_limit_of_an_answer_leaves_a_finite_choice(limit: Any) -> None:
    fleet = Fleet("auto", NO_LIMITS, lambda: 0.0)
    progress = Progress(fleet, {"prompt": [1, 2, 3], "max_tokens": limit, "stream": True})
    choice = fleet.choose(progress, {"a": 0, "b": 0}, {"a": 0, "b": 0})
    assert choice is not None
    assert all(math.isfinite(each) for each in (choice.ttft_s, choice.num_late, choice.total_s, choice.score))


def test_a_fleet_that_changes_at_each_request_leaves_little_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.choice.fleet.MAX_NODES", 10)
    fleet = Fleet("always", NO_LIMITS, lambda: 0.0)
    for number in range(2000):
        urls = [f"http://node-{number}", f"http://node-{number + 1}"]
        progress = Progress(fleet, {"prompt": [number] * 32, "max_tokens": 4})
        choice = fleet.choose(progress, dict.fromkeys(urls, 0), dict.fromkeys(urls, 0))
        assert choice is not None
        progress.prompt_asked(choice.prefill.url)
        fleet.forget(urls[0])
        progress.prompt_ended(is_computed=True)
        progress.answer_began(choice.decode.url)
        progress.ended()
    assert len(fleet._loads) <= 10
    assert len(fleet.prefixes) <= 2 * 2000


# -- the router --------------------------------------------------------------------------------------


@dataclass
class Both:
    """A node that computes and answers."""

    asked: list[dict[str, Any]] = field(default_factory=list)

    async def ready(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "kv_role": "kv_both", "load_failure_policy": "fail"})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return web.json_response({"kv_transfer_params": {"do_remote_prefill": True, "remote_lease": "1"}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    @property
    def num_prefills(self) -> int:
        return sum(
            bool((each.get("kv_transfer_params") or {}).get("do_remote_decode")) for each in self.asked
        )


async def ask(client: Any, prompt: Any, **fields: Any) -> str:
    """Return what the router says of its choice."""
    body = {"prompt": prompt, "stream": True, "max_tokens": 4, **fields}
    async with asyncio.timeout(DEADLINE_S), client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()
        said: str = response.headers.get("X-KV-Placement", "")
        return said


async def test_the_page_and_the_span_show_estimate_and_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(RecentSpans, "keep", lambda self, span, request_id="": kept.append(span))
    async with routed([Both(), Both()], [], does_both=True) as client:
        said = await ask(client, [7] * 64)
        page = await (await client.get("/page/state")).json()
    (record,) = page["finished"]
    assert record["placement"] == said
    (span,) = (span for span in kept if span.name == "router")
    assert span.attributes["placement"] == said
    assert 0 < span.attributes["ttft_s"] < DEADLINE_S


async def test_idle_nodes_compute_the_prompts_that_they_answer() -> None:
    loads = [Both(), Both()]
    async with routed(loads, [], does_both=True) as client:
        for number in range(6):
            assert (await ask(client, [number] * 64)).startswith("local: ")
        page = await (await client.get("/metrics")).text()
    assert 'kvferry_router_placements_total{way="local"} 6.0' in page
    assert not any(each.num_prefills for each in loads)
    assert len(loads[0].asked) + len(loads[1].asked) == 6
    assert not any("remote_lease" in str(body) for each in loads for body in each.asked)
