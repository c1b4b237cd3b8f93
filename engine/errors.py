"""What can go wrong with a request, by the names of the HTTP API. Each is one line and names the field."""

from __future__ import annotations

from errno import EDQUOT, EFBIG, ENOSPC
from typing import Any


class RequestError(Exception):
    """Refuses one request and nothing else. `extra` goes into the error object beside code, message and type."""

    code = 400
    type = "invalid_request_error"

    retry_after: int | None = None  # seconds, where trying again may help

    def __init__(self, message: str, **extra: Any) -> None:
        message = " ".join(message.splitlines())  # it may quote what the client sent
        super().__init__(message)
        self.message = message
        self.extra = extra


class InvalidRequest(RequestError):
    """400: a field has the wrong type, or a value that cannot be served."""


class ExceedsContext(RequestError):
    """400: the prompt can never fit; extra: n_prompt_tokens, n_ctx."""

    type = "exceed_context_size_error"


class Unauthorized(RequestError):
    code, type = 401, "authentication_error"


class Forbidden(RequestError):
    code, type = 403, "permission_error"


class NotFound(RequestError):
    code, type = 404, "not_found_error"


class TooLarge(RequestError):
    code = 413


class UnsupportedEncoding(RequestError):
    """415: a body whose Content-Encoding cannot be unpacked."""

    code = 415


class TooManyRequests(RequestError):
    code, type = 429, "rate_limit_error"


class ServerFault(RequestError):
    code, type = 500, "server_error"


class DiskFull(ServerFault):
    """507: there is no room for what is to be kept."""

    code = 507


def unkept(what: str, error: OSError) -> ServerFault:
    """What to say where something cannot be written."""
    fault = DiskFull if error.errno in (ENOSPC, EDQUOT, EFBIG) else ServerFault
    return fault(f"{what}: {error.strerror or error}")


class BadGateway(RequestError):
    """The server that a router has for the model did not answer."""

    code, type = 502, "server_error"


class NotSupported(RequestError):
    code, type = 501, "not_supported_error"


class Unavailable(RequestError):
    code, type = 503, "unavailable_error"
    retry_after = 1
