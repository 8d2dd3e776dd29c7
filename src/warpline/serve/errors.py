"""Errors in the shape that OpenAI's clients expect."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """An error response: a status, and one line that says what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
        close: bool = False,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.allow, self.close = retry_after, allow, close

    @property
    def kind(self) -> str:
        """OpenAI's name for this kind of error."""
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> bytes:
        """Return the JSON object of the error."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the error besides the content type."""
        found = []
        if self.retry_after is not None:
            found.append((b"retry-after", str(self.retry_after).encode()))
        if self.allow is not None:
            found.append((b"allow", self.allow.encode()))
        if self.status == 401:
            # One header per scheme: browsers read one with several schemes as a single scheme and do not ask for a key.
            found += [(b"www-authenticate", b"Bearer"), (b"www-authenticate", b'Basic realm="warpline"')]
        if self.close:
            found.append((b"connection", b"close"))
        return found


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a request that cannot be honoured."""
    return ApiError(400, message, param=param, code=code)
