"""Images from the network, guarded: a client must not use this server to look into the network it stands in.

Only https, only addresses that belong to the public internet, checked on the very address that is connected to, and
anew at every redirect. deepseek-recipe's fetcher can do the same but has no time limit and cannot be cancelled.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from urllib.parse import SplitResult, urljoin, urlsplit

import h11

from leadline.errors import ImageError
from leadline.text.images import MAX_IMAGE_BYTES

_MAX_REDIRECTS = 3
_READ_BYTES = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses in IPv6 clothes: the gateway would unwrap them
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, and no other address in disguise."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found.sixtofour or found.teredo or found in _NAT64 or found in _LOCAL_NAT64:
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


async def fetch_image(
    url: str,
    *,
    seconds: float,
    max_bytes: int = MAX_IMAGE_BYTES,
    is_allowed: Callable[[str], bool] = is_public,
    tls: ssl.SSLContext | None = None,
) -> bytes:
    """The bytes behind a https URL.

    Args:
        seconds: for everything: names, connections, redirects, body.
        is_allowed: whether an IP address may be connected to.
        tls: how servers prove who they are; None for the system's certificates.
    Raises: ImageError for another scheme, a forbidden address, a failed transfer, or too many bytes, redirects or
        seconds. It does not tell an address that cannot be reached from one that is forbidden.
    """
    try:
        async with asyncio.timeout(seconds):
            for _ in range(_MAX_REDIRECTS + 1):
                found = await _get(_checked(url), max_bytes, is_allowed, tls or ssl.create_default_context())
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
    except TimeoutError:
        raise ImageError(f"image URL: no answer from its server within {seconds:g} seconds") from None
    except (OSError, h11.RemoteProtocolError, h11.LocalProtocolError, ValueError):
        raise ImageError("image URL: cannot be fetched: its server is not reachable or not a public one") from None
    raise ImageError(f"image URL: expected at most {_MAX_REDIRECTS} redirects")


def _checked(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname or parts.username is not None:
        raise ImageError(f"image URL: expected https://host/..., got {url[:80]!r}")
    return parts


async def _get(
    parts: SplitResult, max_bytes: int, is_allowed: Callable[[str], bool], tls: ssl.SSLContext
) -> bytes | str:
    """The body of one answer, or the place it redirects to."""
    host, port = str(parts.hostname), parts.port or 443
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found if is_allowed(str(entry[4][0]))]
    if not addresses:
        raise OSError("no allowed address")
    reader, writer = await asyncio.open_connection(addresses[0], port, ssl=tls, server_hostname=host)
    try:
        connection = h11.Connection(h11.CLIENT)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = [("Host", parts.netloc), ("User-Agent", "leadline"), ("Accept", "image/*"), ("Connection", "close")]
        request = h11.Request(method="GET", target=target, headers=headers)
        writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        body = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                location = dict(event.headers).get(b"location")
                if event.status_code in (301, 302, 303, 307, 308) and location is not None:
                    return location.decode("ascii")
                if event.status_code != 200:
                    raise ImageError(f"image URL: its server answered {event.status_code}")
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > max_bytes:
                    raise ImageError(f"image URL: expected at most {max_bytes} bytes, its server sends more")
            elif isinstance(event, h11.EndOfMessage):
                return bytes(body)
            elif not isinstance(event, h11.InformationalResponse):
                raise OSError("connection closed")
    finally:
        writer.close()
