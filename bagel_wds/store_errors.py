"""What went wrong with a store, in our words: from the class and the text of its client's error.

The text has the URL in it, with whatever signs it, and is not passed on. Where nothing is known of it, what it says of the
cause is taken, without any URL.
"""

from __future__ import annotations

import re

from bagel_wds.redact import redact
from bagel_wds.steady import TransientError, replaced


class PastEndError(OSError):
    """Bytes were asked for that begin behind the object's end."""


class WornOutError(TransientError):
    """What might pass, but the client has tried again as often as it may."""


_STATUS = re.compile(r"status code: (\d{3})([^:\n]*):? ?(.*)")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_SYSTEM = re.compile(r'(?:message|error): "([^"]+)"|(TimedOut)|(IncompleteBody)')
_FIRST_LINE = re.compile(r"^(?:Generic \S+ error: )*(?:.*?Error performing \S+ .*? - +)?(.*)")
_URL = re.compile(r"\(?\b[a-z][a-z0-9+.-]*://\S*", re.IGNORECASE)
_ODD_KEY = re.compile(r'[Pp]ath "(.*?)(?:"|\n|$)')
_WORN_OUT = re.compile(r"after [1-9]\d* retries")

_CAUSES = {
    "TimedOut": "no answer in time",
    "IncompleteBody": "the connection was closed before the end of the answer",
}
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken")
_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")


def explain(error: Exception, name: str) -> OSError:
    """An object store client's error as one of ours: what happened, in one line, and what to do.

    Args:
        error: of obstore; by its class and text.
        name: of the object, without credentials.
    """
    text, kind = str(error), type(error).__name__
    found, code = _STATUS.search(text), _CODE.search(text)
    said = f"{found[1]}{found[2].rstrip()}" + (f" ({code[1]})" if code else "") if found else ""
    status = int(found[1]) if found else 0
    told = _explain_text(text, name) or _explain_code(code[1] if code else "", said, name)
    if told is not None:
        return told
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(
            f"{name}: there is no such object{said and f' ({said})'}; check the bucket and the path"
        )
    if status in (401, 403) or kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return PermissionError(
            f"{name}: access is refused ({said or kind}); check the credentials, that they may read this bucket, its region, and "
            "the clock of this machine"
        )
    if kind == "PreconditionError":
        return OSError(replaced(name))
    if status:
        return _explain_status(status, said, name, worn_out=bool(_WORN_OUT.search(text)))
    cause = f"the store answered {code[1]}" if code else _cause_in(text) or kind
    return _transient(_URL.sub("the URL", cause)[:200], worn_out=bool(_WORN_OUT.search(text)))


def _cause_in(text: str) -> str:
    causes = [cause for groups in _SYSTEM.findall(text) for cause in groups if cause]
    first = _FIRST_LINE.match(text)
    return _CAUSES.get(causes[-1], causes[-1]) if causes else first[1] if first else ""


def _transient(cause: str, *, worn_out: bool) -> TransientError:
    return WornOutError(cause) if worn_out else TransientError(cause)


def _explain_text(text: str, name: str) -> OSError | None:
    """What the client tells by its words alone."""
    if "invalid path" in text and (odd := _ODD_KEY.search(text)):
        return OSError(
            f"{name}: a key under it has a part that is empty, `.` or `..`, or a control character, and cannot be listed: "
            f"{redact(odd[1])!r}; rename or remove that object, or name the others by a manifest or a brace pattern"
        )
    if "redirect without LOCATION" in text:
        return _elsewhere("a redirect that says not where", name)
    return None


def _elsewhere(said: str, name: str) -> OSError:
    return OSError(
        f"{name}: the bucket is in another region than the one that was asked ({said}); set `region` under `storage`, or "
        "AWS_REGION in the environment"
    )


def _explain_code(code: str, said: str, name: str) -> OSError | None:
    """What a store's own code for an error tells that its status does not."""
    if code in _EXPIRED:
        return PermissionError(
            f"{name}: the credentials have expired, or their session token is not whole ({said}); get new ones, all that belong "
            "together (for s3:// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN)"
        )
    if code in _REGION:
        return _elsewhere(said, name)
    if code == "InvalidObjectState":
        return OSError(f"{name}: the object is archived ({said}); restore it first")
    if code == "RequestTimeout":
        return TransientError(f"the store answered {said}")
    return None


def _explain_status(status: int, said: str, name: str, *, worn_out: bool) -> OSError:
    if status == 416:
        return PastEndError(
            f"{name}: the object ends before the first byte that was asked for ({said}); it is shorter than the index or manifest "
            "beside it says, copy it again"
        )
    if 400 <= status < 500 and status not in (408, 429):
        # A HEAD has no body that would say more.
        more = ", and that the credentials have not expired" if said == "400 Bad Request" else ""
        return OSError(
            f"{name}: the store refuses the request ({said}); check its endpoint, region and options{more}"
        )
    if status == 501:
        return OSError(
            f"{name}: the store cannot do what it is asked for ({said}); use one that speaks more of the protocol, or the disk"
        )
    return _transient(f"the store answered {said}", worn_out=worn_out)
