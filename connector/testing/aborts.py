"""Part of the suite for any connector (see `suite`): requests that end before they have their answer."""

from __future__ import annotations

import time
from itertools import product

import pytest

from .broken import promise
from .harness import PER_LAYER, MakeNode, compute, fetch, finish, node_of_ranks, settle
from .shapes import Request

LENGTH = 18
OFFER = {"do_remote_decode": True}


class RequestsThatEndEarly:
    """Whenever a request is aborted, its blocks come back, once, and the next request finds everything in
    order.
    """

    def test_a_prompt_that_was_not_finished_frees_its_blocks(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER, max_step_tokens=5), make_node(PER_LAYER)
        # Two steps compute half of the prompt, four the whole prompt, five a token of the answer.
        for number, (reason, num_steps) in enumerate(product(("abort", "error"), (0, 1, 2, 4, 5))):
            first = 100 * number
            producer.add(Request(f"p{number}", LENGTH, OFFER, first_token_id=first), max_answer_tokens=5)
            for _ in range(num_steps):
                producer.step()
            producer.finish(f"p{number}", reason)
            settle(producer)
            params = compute(producer, Request(f"again{number}", LENGTH, first_token_id=first))
            fetch(consumer, producer, Request(f"d{number}", LENGTH, params, first_token_id=first))
            settle(producer, consumer)

    @pytest.mark.parametrize("num_ranks", [1, 2])
    def test_what_a_failed_step_computed_is_not_found(self, make_node: MakeNode, num_ranks: int) -> None:
        """A hook has raised, on one rank if there are several. What the step computed after that is wrong.

        The next step computes another prompt, so that layers of both steps would show in one load.
        """
        producer, consumer = (node_of_ranks(make_node, num_ranks) for _ in range(2))
        for layer in range(PER_LAYER.num_layers):
            for num_chunks in (1, 2):
                name, first = f"{layer}, {num_chunks}", 100 * (2 * layer + num_chunks)
                producer.max_step_tokens = -(-LENGTH // num_chunks)
                producer.add(Request(f"p{name}", LENGTH, OFFER, first_token_id=first))
                for _ in range(num_chunks - 1):
                    producer.step()
                producer.step(failing_layer=layer)
                settle(producer)
                other = 10_000 + first
                params = compute(producer, Request(f"other{name}", LENGTH, first_token_id=other))
                consumer.add(Request(f"d{name}", LENGTH, first_token_id=first))
                finish(consumer, f"d{name}")
                fetch(consumer, producer, Request(f"d-other{name}", LENGTH, params, first_token_id=other))
                params = compute(producer, Request(f"again{name}", LENGTH, first_token_id=first))
                fetch(consumer, producer, Request(f"d-again{name}", LENGTH, params, first_token_id=first))
                settle(producer, consumer)

    def test_a_request_that_was_only_asked_about_leaves_nothing(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        params = compute(producer, Request("p", LENGTH))
        request = Request("d", LENGTH, params)
        consumer.add(request, is_queued=True)
        for num_here in (0, 8, 0):
            consumer.scheduler.get_num_new_matched_tokens(request, num_here)
        consumer.finish(request.request_id)
        settle(producer, consumer)
        num_reports = consumer.num_reports("d", "recving")
        promise(
            "a request that loaded nothing is not named in finished_recving",
            kept=num_reports == 0,
            seen=f"request 'd' was named {num_reports} times",
        )

    def test_a_load_that_is_aborted_frees_its_blocks_once(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        for num_steps in (0, 1, 2):
            first = 100 * num_steps
            params = compute(producer, Request(f"p{num_steps}", LENGTH, first_token_id=first))
            request = Request(f"d{num_steps}", LENGTH, params, first_token_id=first)
            consumer.add(request, max_answer_tokens=50)
            for _ in range(num_steps):
                consumer.step()
            consumer.finish(request.request_id)
            settle(producer, consumer)
            params = compute(producer, Request(f"p-again{num_steps}", LENGTH, first_token_id=first))
            fetch(consumer, producer, Request(f"d-again{num_steps}", LENGTH, params, first_token_id=first))
            settle(producer, consumer)

    def test_a_load_that_is_aborted_does_not_end_another(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        first = compute(producer, Request("p1", LENGTH))
        second = compute(producer, Request("p2", LENGTH, first_token_id=100))
        consumer.add(Request("d1", LENGTH, first))
        consumer.add(Request("d2", LENGTH, second, first_token_id=100))
        consumer.step()
        if consumer.is_running("d1"):
            consumer.finish("d1")
        finish(consumer, "d2", producer)
        settle(producer, consumer)

    def test_a_node_that_shuts_down_waits_for_nothing(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        params = compute(producer, Request("p", LENGTH))
        producer.add(Request("x", LENGTH, OFFER, first_token_id=100))
        producer.step()  # what it saves or offers is not over
        consumer.add(Request("d", LENGTH, params))
        consumer.step()  # nor is this load
        begin = time.monotonic()
        for node in (consumer, producer):
            for half in node.halves:
                half.shutdown()
        seconds = time.monotonic() - begin
        promise(
            "a half that is shut down ends what is under way, and does not wait for it",
            kept=seconds < producer.deadline_s,
            seen=f"shutting two nodes down took {seconds:.1f} s",
        )
