"""Errors as OpenAI's API writes them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import ClientConnectionResetError, web
from aiohttp.typedefs import Handler

__all__ = ["ApiError", "bad_request", "error_middleware", "unavailable"]

logger = logging.getLogger(__name__)

#: What counts as the answer to a client that left while it was answered; servers have agreed on the number.
CLIENT_LEFT = 499


class ApiError(Exception):
    """An answer other than the one that was asked for.

    Attributes:
        status: The HTTP status.
        kind: OpenAI's `type`.
        param: The field of the request at fault, or None.
        code: OpenAI's `code`, a word for programs, or None.
    """

    def __init__(
        self, status: int, message: str, *, kind: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON that the client gets."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> web.Response:
        """The whole HTTP answer."""
        return web.json_response(self.body(), status=self.status)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client asked for something that cannot be: HTTP 400."""
    return ApiError(400, message, kind="invalid_request_error", param=param, code=code)


def unavailable(message: str) -> ApiError:
    """Not now, or not here; another node may do it: HTTP 503."""
    return ApiError(503, message, kind="service_unavailable_error", code="unavailable")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error, also aiohttp's own and our bugs, with an OpenAI error object."""
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPRequestEntityTooLarge as error:
        return bad_request(f"the request body is too large: {error.reason}").response()
    except web.HTTPException as error:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return ApiError(
            error.status, f"{request.method} {request.path}: {error.reason}", kind=kind
        ).response()
    except ClientConnectionResetError:
        return web.Response(status=CLIENT_LEFT)  # nobody is there to read it
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return ApiError(500, f"{type(error).__name__}: {error}", kind="server_error").response()
