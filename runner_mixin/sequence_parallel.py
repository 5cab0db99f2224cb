"""Find out whether a step's residual is spread over the tensor-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..transports.errors import ConfigurationError

if TYPE_CHECKING:
    from ..connector.config import EngineConfig


def is_residual_scattered_for_sp(config: EngineConfig, num_input_tokens: int) -> bool:
    """Return whether sequence parallelism leaves each rank with its share of the tokens' residual.

    It does if it is on, there are several tensor-parallel ranks, and the compiler rewrote the graph that
    runs. The compiler rewrites every graph if the model is one graph or is partitioned by the compiler, and
    otherwise only those of the listed sizes.

    Args:
        config: The node's configuration.
        num_input_tokens: Tokens of the step, including padding.

    Raises:
        ConfigurationError: the number of tokens is not a multiple of the number of ranks.
    """
    compilation, ranks = config.compilation, config.parallel.tensor_parallel_size
    if not compilation.enable_sequence_parallelism or ranks == 1:
        return False
    if num_input_tokens % ranks:
        raise ConfigurationError(
            f"sequence parallelism over {ranks} ranks needs a multiple of {ranks} tokens, got {num_input_tokens}",
            key="num_input_tokens",
            value=num_input_tokens,
        )
    if compilation.full_graph or compilation.use_graph_partition:
        return True
    return num_input_tokens in compilation.compile_sizes
