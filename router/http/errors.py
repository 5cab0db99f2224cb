"""Errors as OpenAI's API writes them: `{"error": {"message", "type", "param", "code"}}`. Those of Anthropic's
endpoints have that API's form: `{"type": "error", "error": {"type", "message"}}`.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import ClientConnectionResetError, web
from aiohttp.typedefs import Handler

from .endpoints import has_form_of_messages

logger = logging.getLogger(__name__)

#: After these errors, close the connection: what the client sends next may be the rest of a bad request.
CLOSED_AFTER = frozenset({400, 401, 403, 408, 413, 415})
#: Seconds until a retry if nothing is known about the cause.
RETRY_AFTER_S = 1

#: Status for a client that left before its answer was complete. Other servers use the same number.
CLIENT_LEFT = 499

#: Anthropic's types of errors by status.
_TYPES_OF_MESSAGES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# aiohttp before 3.14 knows no typed keys, and later versions warn of others.
_ANSWERED_STATUS: Any = (
    web.RequestKey("answered_status", int) if hasattr(web, "RequestKey") else "answered_status"
)


def note_answered(request: web.Request, status: int) -> None:
    """Note that a client has all of its answer, although the handler has not returned.

    A client may close its connection as soon as it has read the end of a stream. This cancels the handler, or
    fails its next write, and the request has been answered all the same.
    """
    request[_ANSWERED_STATUS] = status


def answered_status(request: web.Request) -> int | None:
    """Return the status that `note_answered` has noted. None if it has noted nothing."""
    status: int | None = request.get(_ANSWERED_STATUS)
    return status


class ApiError(Exception):
    """An error that becomes the answer to a request.

    Attributes:
        status: The HTTP status.
        kind: OpenAI's `type`.
        param: The request's field that is wrong, or None.
        code: OpenAI's `code`, which programs can test, or None.
        retry_after_s: Seconds until the same request may succeed. None: unknown, or never.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the JSON body of the answer, in the form of an endpoint."""
        if has_form_of_messages(path):
            default = "invalid_request_error" if self.status < 500 else "api_error"
            kind = _TYPES_OF_MESSAGES.get(self.status, default)
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, path: str = "") -> web.Response:
        """Return the HTTP answer, in the form of an endpoint."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.json_response(self.body(path), status=self.status, headers=headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Make the error for a request that cannot be served: HTTP 400."""
    return ApiError(400, message, kind="invalid_request_error", param=param, code=code)


def unavailable(message: str, *, retry_after_s: int | None = RETRY_AFTER_S) -> ApiError:
    """Make the error for a request that this server cannot serve now, but another one may: HTTP 503.

    Args:
        retry_after_s: Seconds until a retry at this server. None if it will not serve before it is restarted.
    """
    return ApiError(
        503, message, kind="service_unavailable_error", code="unavailable", retry_after_s=retry_after_s
    )


def too_many_requests(message: str) -> ApiError:
    """Make the error for a request that may be served later: HTTP 429."""
    return ApiError(
        429, message, kind="rate_limit_error", code="too_many_requests", retry_after_s=RETRY_AFTER_S
    )


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error, including aiohttp's errors and our bugs, with an error object."""
    response = await _answer(request, handler)
    if response.status in CLOSED_AFTER:
        response.force_close()
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error.response(request.path)
    except web.HTTPException as error:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        message = f"{request.method} {request.path}: {error.reason}"
        response = ApiError(error.status, message, kind=kind).response(request.path)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ClientConnectionResetError:
        return web.Response(status=CLIENT_LEFT)  # the client has left, so nothing reads this
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return ApiError(500, f"{type(error).__name__}: {error}", kind="server_error").response(request.path)
