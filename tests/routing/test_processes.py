"""What the processes of one router tell each other: replayed steps, merged metrics, and frames."""

from __future__ import annotations

import random

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.router.choice.fleet import Fleet, Progress
from kvferry.router.choice.placement import Limits, NodeLoad
from kvferry.router.choice.replay import Mirrors, Step, Teller
from kvferry.router.processes import MAX_FRAME, Frame, Frames, Kind
from kvferry.router.seen.merged import merged_metrics, merged_nodes

URLS = [f"http://n{number}" for number in range(4)]


class Process:
    """A fleet whose steps are encoded as JSON and replayed in the other fleets immediately."""

    def __init__(self, number: int, others: list[Process], clock: list[float]) -> None:
        self.number, self.others = number, others
        self.fleet = Fleet("auto", Limits(), lambda: clock[0])
        self.mirrors = Mirrors(self.fleet)
        self.teller = Teller(self.fleet, self._tell, tokens_s=0.0)
        self.live: list[Progress] = []

    def _tell(self, step: Step) -> None:
        for other in self.others:
            if other is not self:
                other.mirrors.take(self.number, orjson.loads(orjson.dumps(step)))

    def act(self, draw: random.Random) -> None:
        if not self.live or draw.random() < 0.3:
            progress = Progress(self.fleet, {"prompt": "word " * draw.randint(1, 400), "stream": True})
            choice = self.fleet.choose(progress, dict.fromkeys(URLS, 0), dict.fromkeys(URLS, 0))
            assert choice is not None
            progress.prompt_asked(choice.prefill.url)
            self.live.append(progress)
            return
        progress = draw.choice(self.live)
        assert progress.choice is not None
        match draw.randrange(5):
            case 0:
                progress.prompt_ended(is_computed=draw.random() < 0.8)
            case 1:
                progress.answer_began(progress.choice.decode.url)
            case 2:
                progress.tokens_came(draw.randint(1, 3))
            case 3:
                progress.answer_ended()
            case 4:
                progress.ended()
                self.live.remove(progress)


def measured(load: NodeLoad) -> list[float]:
    return [load.queue_s, *(line.at(x) for line in (load.prompt, load.step) for x in (0.0, 100.0))]


def work_at(fleet: Fleet) -> list[tuple[int, ...]]:
    loads = map(fleet.load, URLS)
    return [(len(load.prompts), len(load.answers), len(load.coming)) for load in loads]


@pytest.mark.parametrize("seed", range(5))
def test_fleets_that_replay_each_others_steps_have_equal_states(seed: int) -> None:
    draw, clock, processes = random.Random(seed), [100.0], list[Process]()
    for number in range(3):
        processes.append(Process(number, processes, clock))
    for _ in range(400):
        clock[0] += draw.random() / 20
        draw.choice(processes).act(draw)
        one, *others = (process.fleet for process in processes)
        for other in others:
            assert work_at(other) == work_at(one)
            for url in URLS:
                assert measured(other.load(url)) == pytest.approx(measured(one.load(url)))
    keys = one.prefixes.keys_of({"prompt": "word " * 400})
    assert all(other.prefixes.shares(keys) == one.prefixes.shares(keys) for other in others)
    assert any(process.live for process in processes)
    newcomer = Process(3, [], clock)
    for process in processes:
        newcomer.mirrors.begin(process.number, orjson.loads(orjson.dumps(process.teller.state())))
    assert work_at(newcomer.fleet) == work_at(one)
    for process in processes:
        for other in (*processes, newcomer):
            other.mirrors.end(process.number)
        for progress in process.live:
            progress.ended()
    assert all(set(work_at(each.fleet)) == {(0, 0, 0)} for each in (*processes, newcomer))
    assert not any(any(each.mirrors._of.values()) or each.teller.state() for each in (*processes, newcomer))


def test_tokens_are_told_a_few_times_per_second_and_none_is_counted_twice() -> None:
    clock, told = [0.0], list[Step]()
    fleet = Fleet("auto", Limits(), lambda: clock[0])
    Teller(fleet, told.append)
    progress = Progress(fleet, {"prompt": "p"})
    progress.answer_began(URLS[0])
    for _ in range(100):
        clock[0] += 0.02
        progress.tokens_came(1)
    counts = [step[3] for step in told if step[1] == "tokens_came"]
    assert 6 <= len(counts) <= 9
    assert 100 - 13 <= sum(counts) <= 100


def page(requests: int, in_flight: int, healthy: int, *buckets: int) -> bytes:
    lines = [
        "# TYPE kvferry_router_requests_total counter",
        f'kvferry_router_requests_total{{status="200"}} {requests}',
    ]
    lines += [
        "# TYPE h histogram",
        f'h_bucket{{le="1.0"}} {buckets[0]}',
        f'h_bucket{{le="+Inf"}} {buckets[1]}',
    ]
    lines += [f"h_count {buckets[1]}", f"h_sum {buckets[1]}"]
    lines += [
        "# TYPE kvferry_router_node_in_flight gauge",
        f'kvferry_router_node_in_flight{{url="u"}} {in_flight}',
    ]
    lines += ["# TYPE kvferry_router_node_healthy gauge", f'kvferry_router_node_healthy{{url="u"}} {healthy}']
    return "\n".join([*lines, ""]).encode()


def values_of(text: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(text.decode())
    return {
        sample.name + sample.labels.get("le", ""): sample.value
        for each in families
        for sample in each.samples
    }


def test_counts_and_gauges_of_requests_are_summed_and_gauges_of_nodes_are_not() -> None:
    pages = [page(3, 1, 1, 2, 3), page(4, 2, 1, 1, 4)]
    counts = {
        "kvferry_router_requests_total": 7,
        "h_bucket1.0": 3,
        "h_bucket+Inf": 7,
        "h_count": 7,
        "h_sum": 7,
    }
    gauges = {"kvferry_router_node_in_flight": 3, "kvferry_router_node_healthy": 1}
    assert values_of(merged_metrics(pages)) == counts | gauges
    # What a process that has ended leaves behind.
    assert values_of(merged_metrics([b"", *pages], only_counts=True)) == counts


def test_a_nodes_requests_are_those_of_all_processes() -> None:
    def node(in_flight: int, state: str) -> dict[str, object]:
        return {
            "role": "decode",
            "url": "u",
            "state": state,
            "in_flight": in_flight,
            "offers": 1,
            "ejections": 0,
        }

    assert merged_nodes([node(1, "ready")], [[node(2, "gone")], []]) == [{**node(3, "ready"), "offers": 2}]


def test_frames_are_cut_from_any_pieces_and_are_bounded() -> None:
    sent = [Frame(Kind.TELL, b"x" * 1000, 1, 2), Frame(Kind.DRAIN), Frame(Kind.ANSWER, b"y", 3, 4)]
    raw, frames, draw = b"".join(frame.encoded() for frame in sent), Frames(), random.Random(1)
    found: list[Frame] = []
    while raw:
        num = draw.randint(1, 50)
        found += frames.feed(raw[:num])
        raw = raw[num:]
    assert found == sent
    with pytest.raises(ValueError, match="a frame of"):
        Frame(Kind.TELL, bytes(MAX_FRAME + 1)).encoded()
    with pytest.raises(ValueError, match="a frame of"):
        list(Frames().feed((MAX_FRAME + 1).to_bytes(4, "big") + bytes(9)))
