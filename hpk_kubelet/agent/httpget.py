"""HTTP GET as probes and hooks make it (pkg/probe/http): a request, its answer's beginning."""

import asyncio
import contextlib
import ssl
from typing import Any, Dict, List, NamedTuple, Optional, Tuple
from urllib.parse import urljoin, urlsplit

from .connection import resolved
from .sockets import connect, reason

MAX_BODY = 10 * 1024  # bytes that are kept
MAX_REDIRECTS = 10
Headers = List[Tuple[str, str]]


class HttpError(Exception):
    """There is no answer; Go's kind of words for why."""


class Answer(NamedTuple):
    status: int
    location: str  # where it redirects to, "" without
    body: str


def request(url: str, headers: Headers) -> bytes:
    """The text of a GET. A header of the caller's replaces ours."""
    parts = urlsplit(url)
    every = {"Host": parts.netloc, "User-Agent": "kube-probe/1.36", "Accept": "*/*",
             "Connection": "close"}  # fmt: skip
    for name, value in headers:
        every = {k: v for k, v in every.items() if k.lower() != name.lower()}
        every[name] = value
    path = (parts.path or "/") + ("?" + parts.query if parts.query else "")
    lines = ["GET %s HTTP/1.1" % path, *("%s: %s" % item for item in every.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", errors="replace")


def parse(head: bytes) -> Tuple[int, Dict[str, str]]:
    """Status and headers (names in small letters); ValueError for what is no HTTP."""
    first, *rest = head.decode("latin-1").split("\r\n")
    fields = first.split(None, 2)
    if len(fields) < 2 or not fields[0].startswith("HTTP/") or not fields[1].isdigit():
        raise ValueError(first)
    headers = {}
    for line in rest:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return int(fields[1]), headers


async def get_once(netns: int, url: str, headers: Headers) -> Answer:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    context: Optional[ssl.SSLContext] = None
    if secure:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        reader, writer = await connect(netns, resolved(host), port, context)
    except OSError as e:
        raise HttpError('Get "%s": dial tcp %s:%d: connect: %s'
                        % (url, host, port, reason(e))) from None  # fmt: skip
    try:
        writer.write(request(url, headers))
        head = await reader.readuntil(b"\r\n\r\n")
        status, found = parse(head[:-4])
        body = await reader.read(MAX_BODY)
        location = found.get("location", "") if status in (301, 302, 303, 307, 308) else ""
        return Answer(status, location, body.decode(errors="replace"))
    except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise HttpError('Get "%s": EOF' % url) from None
    except OSError as e:
        raise HttpError('Get "%s": %s' % (url, e)) from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def get(netns: int, url: str, headers: Headers) -> Answer:
    """Follows redirects within the same host alone: one to another host is the answer."""
    first = urlsplit(url).hostname
    for _ in range(MAX_REDIRECTS):
        answer = await get_once(netns, url, headers)
        if not answer.location:
            return answer
        target = urljoin(url, answer.location)
        if urlsplit(target).hostname != first:
            return answer
        url = target
    raise HttpError('Get "%s": stopped after %d redirects' % (url, MAX_REDIRECTS))


def address(action: Dict[str, Any], pod_ip: str) -> Tuple[str, Headers]:
    """The URL and the headers of an httpGet action."""
    path = action.get("path") or "/"
    scheme = action.get("scheme", "HTTP").lower()
    host = action.get("host") or pod_ip
    if ":" in host:
        host = "[%s]" % host
    url = "%s://%s:%d%s" % (scheme, host, int(action["port"]), "/" + path.lstrip("/"))
    return url, [(header["name"], header["value"]) for header in action.get("httpHeaders") or []]
