"""Answer several prompts, each several times, as one stream of pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from ..engine.types import GenerationRequest, RequestOutput

Generate = Callable[[GenerationRequest], AsyncGenerator[RequestOutput, None]]
#: The index of an answer, and a piece of it.
Piece = tuple[int, RequestOutput]


async def pieces_of(
    prompts: Sequence[Sequence[GenerationRequest]], generate: Generate
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all answers as they are made, until each has ended.

    The first answer to a prompt starts at once, and the others when it has its first token. The prompt is
    then in the prefix cache, so it is computed or loaded only once. Closing the generator ends all answers.

    Args:
        prompts: By prompt, the requests for its answers. All prompts have equally many; answers are numbered
            through.

    Raises:
        Exception: what `generate` raised for the first request that fails; the others are ended.
    """
    if len(prompts) == len(prompts[0]) == 1:
        async with contextlib.aclosing(generate(prompts[0][0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    tasks: set[asyncio.Task[None]] = set()

    async def follow(index: int, request: GenerationRequest, others: Sequence[GenerationRequest]) -> None:
        try:
            async with contextlib.aclosing(generate(request)) as outputs:
                async for output in outputs:
                    if output.new_token_ids or output.finish_reason:
                        for number, other in enumerate(others, index + 1):
                            tasks.add(asyncio.create_task(follow(number, other, ())))
                        others = ()
                    arrived.put_nowait((index, output))
        except Exception as error:  # noqa: BLE001 - raised again by the consumer of the queue
            arrived.put_nowait(error)

    try:
        for number, (first, *others) in enumerate(prompts):
            tasks.add(asyncio.create_task(follow(number * len(prompts[0]), first, others)))
        num_left = sum(map(len, prompts))
        while num_left:
            piece = await arrived.get()
            if isinstance(piece, Exception):
                raise piece
            num_left -= piece[1].finish_reason is not None
            yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
