"""Text without the credentials that a URL in it may carry."""

from __future__ import annotations

import re

_USER = re.compile(
    r"(\b[a-z][a-z0-9+.-]*://)"
    # What stands before an @ of the host; or, since a password may hold a slash, all up to the last @ behind a name and
    # a colon that begins no port.
    r"(?:[^/\s\"<>]*@|[^/\s:@\['\"<>]*:(?!\d+(?:[/?#,;\s'\")\]]|$))[^\s\"<>]{0,2048}@)",
    re.IGNORECASE,
)
_SECRET = re.compile(
    r"([?&;#](?:[^=&;?#\s'\"<>]*(?:sig|token|key|secret|credential|passw|pwd|auth|policy|session|accessid|jwt|hdnts|hmac)"
    r"[^=&;?#\s'\"<>]*|code)=)"
    r"[^&;\s'\"<>]+",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """The same text, but for the user of a URL and the values of a query that signs or opens something.

    >>> redact("https://me:mine@host/a.tar?part=1&X-Amz-Signature=0123")
    'https://***@host/a.tar?part=1&X-Amz-Signature=***'
    """
    if "://" not in text:
        return text
    return _SECRET.sub(r"\1***", _USER.sub(r"\1***@", text))
