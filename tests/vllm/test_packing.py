"""CPU attention stores keys in an order that depends on the processor.

A node with another order is refused by name.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: vLLM as on a processor for which it has other kernels. Every processor supports those of "vec16".
MODULE = """
from vllm.v1.attention.backends import cpu_attn

from kvferry.connector.vllm import KvferryConnector

cpu_attn._get_attn_isa = lambda *arguments, **options: "vec16"


class ConnectorElsewhere(KvferryConnector):
    pass
"""


@pytest.fixture(scope="module")
def running_pair(start_node, shm_pair, tmp_path_factory):
    """A prefill node that packs keys in another way."""
    folder = tmp_path_factory.mktemp("connector")
    (folder / "connector_elsewhere.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(folder))
        prefill = start_node(connector=("ConnectorElsewhere", "connector_elsewhere"))
    yield type(shm_pair)(prefill.wait_until_ready(), shm_pair.decode, shm_pair.names)
    prefill.close()


def test_a_node_that_packs_keys_differently(pair, prompt):
    tokens = prompt(100)
    answer = pair.hand_over(tokens)
    pair.assert_ended_by("fail", answer, tokens)
    assert "incompatible peer: packing differs" in pair.decode.log
