"""Images from the network: which addresses, how much, how long."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from leadline.errors import ImageError
from leadline.server.images import fetch_image, is_public

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("172.16.3.4", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2001:0:7f00:1::", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert)]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the openssl command")
    return key, cert


ANSWERS = {
    "/ok": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nimage",
    "/open": b"HTTP/1.0 200 OK\r\n\r\nto the end",
    "/chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
    "/big": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000,
    "/missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "/garbage": b"hello\r\n\r\n",
    "/cut": b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nimage",
    "/moved": b"HTTP/1.1 302 Found\r\nLocation: /ok\r\nContent-Length: 0\r\n\r\n",
    "/loop": b"HTTP/1.1 302 Found\r\nLocation: /loop\r\nContent-Length: 0\r\n\r\n",
    "/plain": b"HTTP/1.1 302 Found\r\nLocation: http://localhost/ok\r\nContent-Length: 0\r\n\r\n",
    "/inside": b"HTTP/1.1 302 Found\r\nLocation: https://127.0.0.2/ok\r\nContent-Length: 0\r\n\r\n",
}


def fetch(certificate: tuple[Path, Path], path: str, **options: Any) -> bytes:
    """Fetch from a TLS server on this machine, which only the test's own rule allows."""

    async def run() -> bytes:
        key, cert = certificate
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
            if line == "/hang":
                await asyncio.sleep(5)
            if line == "/drip":
                for _ in range(100):
                    writer.write(b"H")
                    await asyncio.sleep(0.05)
            writer.write(ANSWERS.get(line, b""))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        tls = ssl.create_default_context(cafile=str(cert))
        given: Any = {
            "seconds": 3.0,
            "max_bytes": 1000,
            "tls": tls,
            "is_allowed": lambda a: a == "127.0.0.1",
            **options,
        }
        try:
            return await fetch_image(f"https://localhost:{port}{path}", **given)
        finally:
            server.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"), [("/ok", b"image"), ("/open", b"to the end"), ("/chunks", b"abc"), ("/moved", b"image")]
)
def test_fetches(certificate: tuple[Path, Path], path: str, body: bytes) -> None:
    assert fetch(certificate, path) == body


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/big", "at most 1000 bytes"),
        ("/missing", "404"),
        ("/garbage", "cannot be fetched"),
        ("/cut", "cannot be fetched"),
        ("/loop", "redirects"),
        ("/plain", "https://"),
        ("/inside", "not a public one"),
    ],
)
def test_refuses(certificate: tuple[Path, Path], path: str, word: str) -> None:
    with pytest.raises(ImageError, match=word):
        fetch(certificate, path)


def test_refuses_this_machine_and_strange_certificates(certificate: tuple[Path, Path]) -> None:
    with pytest.raises(ImageError, match="not a public one"):
        fetch(certificate, "/ok", is_allowed=is_public)
    with pytest.raises(ImageError, match="cannot be fetched"):
        fetch(certificate, "/ok", tls=ssl.create_default_context())


@pytest.mark.parametrize("path", ["/hang", "/drip"])
def test_time_limit(certificate: tuple[Path, Path], path: str) -> None:
    with pytest.raises(ImageError, match=r"within 0\.3 seconds"):
        fetch(certificate, path, seconds=0.3)


@pytest.mark.parametrize(
    "url", ["http://example.org/a", "https:///a", "ftp://x/a", "https://u:p@example.org/a", "https://[::1/a", "x", ""]
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ImageError):
        asyncio.run(fetch_image(url, seconds=1))
