"""`leadline serve` in a process of its own, for tests and measurements of what only a process can show."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import httpx

_CODE = "import sys, leadline.cli.main as m; sys.argv = ['leadline', 'serve', *sys.argv[1:]]; m.main()"


class ServerProcess:
    """A server with these arguments of `leadline serve`, ready for requests; ends with the `with` block.

    port: where to listen; None for any free port. log: file for what the server writes.
    Raises: RuntimeError with the log if the server ends before it is ready, or is not ready in time.
    """

    def __init__(self, *arguments: str, log: Path, port: int | None = None, seconds: float = 120.0) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-c", _CODE, *arguments, "--port", str(self.port)]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)
        end = time.monotonic() + seconds
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise RuntimeError(f"the server is not ready:\n{log.read_text()}")
            time.sleep(0.1)

    def memory_mib(self) -> float:
        """Resident memory."""
        match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(match[1]) / 1024 if match else 0.0

    def stop(self, seconds: float = 60.0) -> int:
        """Ask it to end, as an operator does, and return its exit status; killed if it takes longer."""
        self.process.terminate()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).is_success
        except httpx.HTTPError:
            return False


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
