"""A vLLM that allocates its cache in memory that peers cannot map, as versions before 0.31 do: peers still
read it.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: A connector without the hook. vLLM finds it by the path of its module.
MODULE = """
from kvferry.connector.vllm import KvferryConnector


class ConnectorWithoutHook(KvferryConnector):
    def get_mem_pool_context(self):
        return None
"""


@pytest.fixture(scope="module")
def hookless(start_node, shm_pair, tmp_path_factory):
    """A node whose cache is in vLLM's own memory, in contrast to the other nodes."""
    folder = tmp_path_factory.mktemp("connector")
    (folder / "connector_without_hook.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(folder))
        node = start_node(connector=("ConnectorWithoutHook", "connector_without_hook"))
    return node.wait_until_ready()


@pytest.fixture(scope="module", params=["prefill", "decode"])
def running_pair(request, hookless, shm_pair):
    """A pair with that node as its prefill or its decode node."""
    nodes = {"prefill": shm_pair.prefill, "decode": shm_pair.decode, request.param: hookless}
    return type(shm_pair)(nodes["prefill"], nodes["decode"], shm_pair.names)


@pytest.fixture
def mechanism(pair, hookless):
    """The expected mechanism: a mapped pool can be read into any memory, other memory is read through the
    kernel.
    """
    return "process_vm_readv" if pair.prefill is hookless else "mapped"


@pytest.mark.parametrize("num_tokens", [5, 33, 800])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens, mechanism):
    tokens = prompt(num_tokens)
    before = pair.decode.metric("kvferry_load_seconds_count", mechanism=mechanism)
    answer = pair.hand_over(tokens)
    assert pair.decode.metric("kvferry_load_seconds_count", mechanism=mechanism) == before + 1
    pair.assert_like_alone(tokens, answer)


def test_an_offer_that_was_already_read(pair, prompt, policy):
    tokens = prompt(100)
    params = pair.prefilled(tokens)
    pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.decode.order("forget")
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_ended_by(policy, answer, tokens)


def test_it_is_logged_at_the_start(hookless):
    assert "vLLM's memory, which peers cannot map" in hookless.log
