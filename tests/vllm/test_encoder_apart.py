"""An encoder apart: one engine computes images, and another one answers with what was computed, or computes
them itself.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from safetensors import safe_open
from torch import equal

from tests.support.metrics_page import declared

base = pytest.importorskip("vllm.distributed.ec_transfer.ec_connector.base")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not hasattr(base.ECConnectorBase, "ensure_cache_available"),
        reason="in this version of vLLM no request can wait for an encoder's output",
    ),
]

SOON_S = 40.0
NAMES = (f"item-{number}" for number in itertools.count())


#: What a consumer waits for a peer that is frozen.
PATIENCE = {"connect_timeout_s": 3, "claim_timeout_s": 3, "lease_s": 60}


def transfer(role: str, **extra: Any) -> dict[str, Any]:
    return {
        "ec_connector": "KvferryEncoderConnector",
        "ec_connector_module_path": "kvferry.connector.vllm",
        "ec_role": role,
        "ec_connector_extra_config": {"transport": "shm", "pool_mb": 1, **PATIENCE, **extra},
    }


@pytest.fixture(scope="module")
def image_model(tmp_path_factory):
    from kvferry.lab.prove.models import write_tiny_image_model

    return write_tiny_image_model(tmp_path_factory.mktemp("images"))


def settings_of(model, role="", **extra) -> dict[str, Any]:
    """Return the settings of an engine: one that encodes, one that answers, or one without this connector."""
    settings = {"model": model, "skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}
    if role:
        settings["ec_transfer_config"] = transfer(role, **extra)
    if role == "ec_producer":
        settings["kv_transfer_config"] = None
    return settings


@pytest.fixture(scope="module")
def nodes(start_node, image_model):
    nodes = [start_node(**settings_of(image_model, role)) for role in ("ec_producer", "ec_consumer")]
    return [node.wait_until_ready() for node in nodes]


@pytest.fixture
def start(start_node, image_model):
    """Start engines that end with the test."""
    nodes = []

    def start_all(*roles, **extra):
        own = [start_node(**settings_of(image_model, role, **extra)) for role in roles]
        nodes.extend(own)
        return [node.wait_until_ready() for node in own]

    yield start_all
    for node in nodes:
        node.close()


@pytest.fixture
def encoder(nodes):
    return nodes[0]


@pytest.fixture
def answering(nodes) -> Iterator[Any]:
    """The node that answers, with empty caches.

    In the end nothing may be in use or remembered, there or at the encoder.
    """
    for node in nodes:
        node.order("forget_items")
    yield nodes[1]
    for node in nodes:
        assert_at_rest(node)


def assert_at_rest(node) -> None:
    deadline = time.monotonic() + SOON_S
    while True:
        found = node.order("encoder")
        if (found["num_used"], found["num_remembered"]) == (0, 0):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@pytest.fixture
def illustrated(prompt):
    from kvferry.lab.prove.models import IMAGE_TOKEN

    tokens = prompt(100)
    return [*tokens[:28], IMAGE_TOKEN, *tokens[28:]]


def encode(node, tokens, image="red"):
    """Have a node compute an image. Returns the params for another node."""
    return node.ask(next(NAMES), tokens, image=image)["items"]


def ask(node, tokens, items, image="red"):
    """Ask for an answer to a prompt with an image.

    Returns it, and how many items were loaded for it, and failed.
    """
    before = node.order("encoder")
    answer = node.ask(next(NAMES), tokens, 8, image=image, items=items)
    after = node.order("encoder")
    return answer, *(after[name] - before[name] for name in ("num_loaded", "num_failed"))


def assert_like_alone(node, tokens, answer, image="red") -> None:
    """Fail unless an answer is that of the node when it computes the image itself."""
    node.order("forget_items")
    alone, *counts = ask(node, tokens, None, image)
    assert counts == [0, 0]
    assert (answer["tokens"], answer["logprobs"]) == (alone["tokens"], alone["logprobs"])


def test_the_figures_of_an_encoder_are_on_the_servers_metrics_page():
    from kvferry.connector.vllm import KvferryEncoderConnector

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(ec_transfer_config=None)
    metrics = KvferryEncoderConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    build = KvferryEncoderConnector.build_ec_connector_stats
    first = build({"offered": 2, "loaded": 1, "failed": 0, "usage": 0.5})
    metrics.observe(first.aggregate(build({"offered": 1, "loaded": 0, "failed": 3, "usage": 0.25})).data)
    exported = declared(generate_latest(registry).decode())
    values = {name: registry.get_sample_value(name, {"engine": "0"}) for name in exported}
    assert values == {
        "kvferry_encoder_offered_items_total": 3,
        "kvferry_encoder_loaded_items_total": 1,
        "kvferry_encoder_failed_items_total": 3,
        "kvferry_encoder_pool_usage": 0.25,
    }
    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    assert all(f"* `{name}`: {metric.text}\n" in page for name, metric in exported.items())


def test_an_image_is_computed_at_one_node_and_answered_at_another(encoder, answering, illustrated):
    answers = set()
    for image in ("red", "blue"):
        answer, num_loaded, num_failed = ask(
            answering, illustrated, encode(encoder, illustrated, image), image
        )
        assert (num_loaded, num_failed) == (1, 0)
        assert_like_alone(answering, illustrated, answer, image)
        answers.add(tuple(answer["tokens"]))
    assert len(answers) == 2


def test_a_node_that_has_the_image_leaves_it_as_it_is(encoder, answering, illustrated):
    alone = answering.ask(next(NAMES), illustrated, 8, image="red")
    answering.order("forget")
    answer, _, num_failed = ask(answering, illustrated, encode(encoder, illustrated))
    assert num_failed == 0
    assert answer["tokens"] == alone["tokens"]


@pytest.mark.parametrize("what", ["used", "of another image", "malformed", "of another node"])
def test_an_item_that_cannot_be_had_is_computed(encoder, answering, illustrated, what):
    items = encode(encoder, illustrated)
    (item,) = items
    if what == "used":
        assert ask(answering, illustrated, items)[1] == 1
        answering.order("forget_items")
    elif what == "of another image":
        (other,) = encode(encoder, illustrated, "blue").values()
        given, items[item] = items[item], other
    elif what == "malformed":
        given, items[item] = items[item], {**items[item], "remote_lease": 5}
    else:
        given, items[item] = items[item], {**items[item], "remote_epoch": "1"}
    answer, num_loaded, num_failed = ask(answering, illustrated, items)
    assert (num_loaded, num_failed) == (0, 1)
    assert_like_alone(answering, illustrated, answer)
    if what != "used":  # nothing was read of the offer itself
        answering.order("forget_items")
        assert ask(answering, illustrated, {item: given})[1] == 1


def test_what_does_not_fit_into_the_pool_is_computed_where_it_is_needed(encoder, answering, illustrated):
    offered = []
    while (items := encode(encoder, illustrated)) is not None:
        offered.append(items)
        assert len(offered) < 1000
    assert encoder.order("encoder")["num_used"] == len(offered) > 50
    for items in offered:
        answering.order("forget_items")
        assert ask(answering, illustrated, items)[1] == 1
    answering.order("forget_items")
    assert ask(answering, illustrated, encode(encoder, illustrated))[1] == 1


def test_an_aborted_request_leaves_nothing(encoder, answering, illustrated):
    names = [next(NAMES) for _ in range(6)]
    for name in names:
        encoder.start(name, illustrated, image="green")
        encoder.order("abort", request=name)
    done = [encoder.result(name)["items"] for name in names if encoder.has_finished(name)]
    for items in [*done, encode(encoder, illustrated, "green")]:
        name = next(NAMES)
        answering.start(name, illustrated, 8, image="green", items=items)
        answering.order("abort", request=name)
        answering.order("forget_items")
        answer, *_ = ask(answering, illustrated, items, "green")  # loaded, if no load has begun
    assert_like_alone(answering, illustrated, answer, "green")


def test_over_a_network(start, illustrated):
    encoder, answering = start("ec_producer", "ec_consumer", transport="tcp")
    answer, num_loaded, _ = ask(answering, illustrated, encode(encoder, illustrated))
    assert num_loaded == 1
    assert_like_alone(answering, illustrated, answer)


def test_an_image_goes_through_three_nodes(start, encoder, answering, illustrated):
    """One computes the image, one the prompt, and one the answer."""
    (decode,) = start("")
    told = answering.ask(
        next(NAMES),
        illustrated,
        1,
        {"do_remote_decode": True},
        image="red",
        items=encode(encoder, illustrated),
    )
    answer = decode.ask(next(NAMES), illustrated, 8, told["params"], image="red")
    assert decode.order("figures")["num_loads"] == 1
    assert_like_alone(answering, illustrated, answer)


def test_other_weights_under_the_same_name_are_refused(start, answering, illustrated, image_model, tmp_path):
    from kvferry.lab.prove.models import write_other_weights

    path = image_model / "model.safetensors"
    kept = shutil.copy(path, tmp_path)
    other = write_other_weights(image_model, tmp_path / "other", is_encoder=True) / path.name
    with safe_open(kept, "pt") as ours, safe_open(other, "pt") as theirs:
        changed = {name for name in ours.keys() if not equal(ours.get_tensor(name), theirs.get_tensor(name))}  # noqa: SIM118
    assert changed == {"model.vision_model.encoder.layers.0.self_attn.v_proj.weight"}
    shutil.copy(other, path)
    try:
        (encoder,) = start("ec_producer")
    finally:
        shutil.copy(kept, path)
    answer, num_loaded, num_failed = ask(answering, illustrated, encode(encoder, illustrated))
    assert (num_loaded, num_failed) == (0, 1)
    assert "incompatible peer: weights differs" in answering.log
    assert_like_alone(answering, illustrated, answer)


def test_an_encoder_that_is_gone_costs_no_answer(start, answering, illustrated):
    (encoder,) = start("ec_producer")
    offers = {image: encode(encoder, illustrated, image) for image in ("red", "blue")}
    for how, (image, items) in zip((signal.SIGSTOP, signal.SIGKILL), offers.items(), strict=True):
        encoder.signal(how)
        answer, num_loaded, num_failed = ask(answering, illustrated, items, image)
        assert (num_loaded, num_failed) == (0, 1)
        assert_like_alone(answering, illustrated, answer, image)


def test_a_node_whose_workers_were_called_exchanges_nothing(start, answering, illustrated):
    """Its weights may have changed."""
    (encoder,) = start("ec_producer")
    old, _ = encode(encoder, illustrated), encoder.order("call", method="get_supported_tasks")
    for items in (old, encode(encoder, illustrated)):
        answering.order("forget_items")
        answer, num_loaded, num_failed = ask(answering, illustrated, items)
        assert (num_loaded, num_failed) == (0, 1)
    assert_like_alone(answering, illustrated, answer)
