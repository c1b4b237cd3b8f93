"""Request errors by the names of the HTTP API. Each message is one line and names the field."""

from __future__ import annotations

from errno import EDQUOT, EFBIG, ENOSPC
from typing import TypedDict, Unpack


class Extra(TypedDict, total=False):
    """Further members of the error object (`frontend.answers.errors.ErrorDetail`)."""

    n_prompt_tokens: int
    n_ctx: int
    param: str


class RequestError(Exception):
    """Error of one request. `extra` goes into the error object beside code, message and type."""

    code = 400
    type = "invalid_request_error"

    retry_after: int | None = None  # seconds, where trying again may help

    def __init__(self, message: str, **extra: Unpack[Extra]) -> None:
        message = " ".join(message.splitlines())  # it may quote the client
        super().__init__(message)
        self.message = message
        self.extra = extra


class InvalidRequest(RequestError):
    """400: a field has the wrong type, or a value that cannot be served."""


class ExceedsContext(RequestError):
    """400: the prompt can never fit; extra: n_prompt_tokens, n_ctx."""

    type = "exceed_context_size_error"


def exceeds_context(n_prompt: int, n_ctx: int, *, at_least: bool = False, what: str = "request") -> ExceedsContext:
    """Refusal of a prompt; `at_least`: it was not tokenized to its end."""
    n = f"at least {n_prompt}" if at_least else n_prompt
    too_large = "" if what == "request" else "is too large to process: it "  # as llama-server says of each
    return ExceedsContext(
        f"{what} ({n} tokens) {too_large}exceeds the available context size ({n_ctx} tokens), try increasing it",
        n_prompt_tokens=n_prompt,
        n_ctx=n_ctx,
    )


class Unauthorized(RequestError):
    """401: the API key is missing or wrong."""

    code, type = 401, "authentication_error"


class Forbidden(RequestError):
    """403: the API key does not allow this."""

    code, type = 403, "permission_error"


class NotFound(RequestError):
    """404: there is no such object or path."""

    code, type = 404, "not_found_error"


class TooLarge(RequestError):
    """413: the body is too large."""

    code = 413


class UnsupportedEncoding(RequestError):
    """415: a body whose Content-Encoding cannot be unpacked."""

    code = 415


class TooManyRequests(RequestError):
    """429: the queue of waiting requests is full."""

    code, type = 429, "rate_limit_error"


class ServerFault(RequestError):
    """500: the server failed, not the request."""

    code, type = 500, "server_error"


class DiskFull(ServerFault):
    """507: the disk is full."""

    code = 507


def is_full(error: BaseException) -> bool:
    """True for an error of a full disk, or of a quota that is used up."""
    return isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EFBIG)


def unkept(what: str, error: OSError) -> ServerFault:
    """Error for a failed write to disk: DiskFull or ServerFault."""
    fault = DiskFull if is_full(error) else ServerFault
    return fault(f"{what}: {error.strerror or error}")


class BadGateway(RequestError):
    """502: the model's server behind the router did not answer."""

    code, type = 502, "server_error"


class NotSupported(RequestError):
    """501: the operator has not switched this on. A feature that does not exist is a 400: clients repeat a 5xx."""

    code, type = 501, "not_supported_error"


class GaveWay(RequestError):
    """503: a request of a batch left its slot to another request; it is to be asked again."""

    code, type = 503, "gave_way_error"


class Unavailable(RequestError):
    """503: the server cannot do this now; try again later."""

    code, type = 503, "unavailable_error"
    retry_after = 1
