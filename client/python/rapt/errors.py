"""What calls of a server raise. Each error is one of Python's own as well, so that `except TimeoutError` catches it."""

from __future__ import annotations


class CallError(Exception):
    """A call that failed. Its text is the server's."""

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status  # of HTTP, also over gRPC; 0: there was no answer
        # Of calls on caches: "unknown", "closed", "expired", "restarted", "wrong_instance", "pages", "quota", "evicted",
        # "conflict", "generation", "draining"; else "".
        self.reason = reason
        self.retry_after = 0.0  # s; the server asks to wait so long


class InvalidArgument(CallError, ValueError):
    """The request is wrong; the text names the field, what came and what is allowed. 400 and other codes of 4xx."""


class PermissionDenied(CallError, PermissionError):
    """The token or certificate is missing or not accepted. 401, 403."""


class NotFound(CallError, LookupError):
    """The cache, or the path, does not exist. 404."""


class Conflict(CallError, RuntimeError):
    """The cache is not what the call expects. 409."""


class ResourceExhausted(CallError, MemoryError):
    """Beyond a limit of the server, or its memory. 413 always, 429 now."""


class DeadlineExceeded(CallError, TimeoutError):
    """The timeout passed, here or at the server. 408, 504."""


class Unimplemented(CallError, NotImplementedError):
    """The server does not compute this. 501."""


class Unavailable(CallError, ConnectionError):
    """No server answers at this address, it is not ready, or the connection was lost. 502, 503."""


class InternalError(CallError, RuntimeError):
    """A defect of the server, or what is no answer of one. 500 and all else."""


_BY_STATUS: dict[int, type[CallError]] = {
    401: PermissionDenied,
    403: PermissionDenied,
    404: NotFound,
    408: DeadlineExceeded,
    409: Conflict,
    413: ResourceExhausted,
    429: ResourceExhausted,
    501: Unimplemented,
    502: Unavailable,
    503: Unavailable,
    504: DeadlineExceeded,
}


def error_of(status: int, message: str, reason: str) -> CallError:
    usual = InvalidArgument if 400 <= status < 500 else InternalError
    return _BY_STATUS.get(status, usual)(message, status, reason)


# The status of HTTP for a code of gRPC, as the server maps them.
_STATUS_OF_CODE = (200, 499, 500, 400, 504, 404, 409, 403, 429, 400, 409, 400, 501, 500, 503, 500, 401)


def error_of_code(code: int, message: str, reason: str) -> CallError:
    return error_of(_STATUS_OF_CODE[code] if 0 <= code < len(_STATUS_OF_CODE) else 500, message, reason)
