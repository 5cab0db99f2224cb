"""How servers handle errors while they answer."""

from __future__ import annotations

import logging

import pytest
from aiohttp import ServerDisconnectedError, web
from aiohttp.test_utils import TestClient, TestServer

from kvferry.router.http.errors import error_middleware


async def leave_in_the_middle(request: web.Request) -> web.StreamResponse:
    """Answer a client whose connection breaks before the first byte."""
    assert request.transport is not None
    request.transport.abort()
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"too late")
    return response


async def test_a_client_that_leaves_during_its_answer_is_not_logged_as_a_bug_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = web.Application(middlewares=[error_middleware])
    app.router.add_get("/", leave_in_the_middle)
    async with TestClient(TestServer(app)) as client:
        with pytest.raises(ServerDisconnectedError):
            await client.get("/")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
