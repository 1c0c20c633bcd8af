"""Text to token ids and back, for a byte-level BPE vocabulary stored as `tokenizer.json`.

The work is done by the Rust `tokenizers` library. This class adds what the model needs around it: the ids that
`config.json` declares, checks that the file belongs to the model, and the bytes of a single token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from leadline.config.model import ModelConfig
from leadline.errors import CheckpointError, ConfigError, PromptError

_IMAGE_TOKEN = "<｜deepseek_image｜>"
_FEW_CHARS = 4  # for each token that may be: a shorter text is simply read
_PIECE_CHARS = 1 << 18  # read at a time of a longer one
# Spellings of V4.1's chat control tokens. A vocabulary holds all of them or none.
CONTROL_TOKENS = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    _IMAGE_TOKEN,
)


class Tokenizer:
    """The vocabulary of one model.

    Ids come from the model's configuration, not from `tokenizer_config.json` (which names the EOS string as padding).
    Nothing is added to a text unless asked for: no BOS, no EOS. There is no unknown token; every byte has an id.

    Raises:
        ConfigError: the vocabulary has another size than the model, misses a byte, holds only some of the V4.1 control
            tokens (a V4 file), or has the image token at another id than `image_token_id`.
    Source: architecture.md 8.1.
    """

    def __init__(self, tokenizer_json: str, config: ModelConfig) -> None:
        try:
            self._backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the Rust side raises bare Exception
            raise ConfigError(f"tokenizer.json: expected a Hugging Face tokenizer, got {error}") from None
        self._json = tokenizer_json
        self._bytes: dict[int, bytes] = {}  # of the tokens met so far
        self.vocab_size = config.vocab_size
        self.bos_token_id = config.bos_token_id
        self.eos_token_id = config.eos_token_id
        self.pad_token_id = config.pad_token_id
        self.image_token_id = config.image_token_id
        self.has_vision = config.vision is not None
        self._check(config)
        present = [token for token in CONTROL_TOKENS if self._backend.token_to_id(token) is not None]
        if present and len(present) < len(CONTROL_TOKENS):
            missing = ", ".join(token for token in CONTROL_TOKENS if token not in present)
            raise ConfigError(
                f"tokenizer.json: expected all V4.1 control tokens or none, missing {missing}; "
                "a V4 tokenizer.json looks like this, use the file of the V4.1 checkpoint"
            )
        self.has_control_tokens = bool(present)
        if present and self.has_vision and self.id_of(_IMAGE_TOKEN) != self.image_token_id:
            raise ConfigError(
                f"image_token_id: expected {self.id_of(_IMAGE_TOKEN)} (tokenizer.json has {_IMAGE_TOKEN} there), got "
                f"{self.image_token_id}; the two files belong to different checkpoints"
            )

    @classmethod
    def load(cls, folder: str | Path, config: ModelConfig) -> Tokenizer:
        """Read `tokenizer.json` from a checkpoint folder; `tokenizer_config.json` is cross-checked when present.

        Raises:
            CheckpointError: `tokenizer.json` is missing or unreadable.
            ConfigError: as the constructor, or the BOS or EOS named in `tokenizer_config.json` has another id than in
                `config.json`.
        """
        path = Path(folder) / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file; a checkpoint needs its tokenizer.json to read text") from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: expected a readable UTF-8 file, got {error}") from None
        tokenizer = cls(text, config)
        tokenizer._check_tokenizer_config(Path(folder) / "tokenizer_config.json")
        return tokenizer

    def encode(self, text: str, *, add_bos: bool = False, control_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_bos: put the BOS id first.
            control_tokens: read spelled control tokens (`<think>`, ...) as such. False keeps them plain text, which is
                what text typed by a user needs.
        Edge cases: the empty text gives no ids (or just BOS).
        Raises:
            PromptError: the text holds a lone surrogate and so is not Unicode text.
        """
        backend = self._backend if control_tokens else self._plain_backend
        try:
            # The call for many texts lets other threads run meanwhile, for seconds where the text is long.
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError):
            raise PromptError("prompt text: expected Unicode text, got a lone surrogate; decode the input as UTF-8 "
                              "with errors='replace'") from None  # fmt: skip
        return [self.bos_token_id, *ids] if add_bos else ids

    def check_length(self, field: str, text: str, most: int, why: str = "the context less one for the answer") -> None:
        """Refuse a text that surely has more than `most` tokens, in time and memory that go with `most`, not the text.

        Reads pieces of the text until they have twice as many: a cut adds a few tokens at most. A text that passes may
        still be too long.

        Raises:
            PromptError: names the field, and why there is a limit.
        """
        if len(text) <= _FEW_CHARS * most:
            return
        count = 0
        for start in range(0, len(text), _PIECE_CHARS):
            count += len(self.encode(text[start : start + _PIECE_CHARS]))
            if count > 2 * most:
                raise PromptError(
                    f"{field}: expected at most {most} tokens ({why}), got more than {2 * most}; shorten it"
                )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, control tokens spelled out, invalid UTF-8 as U+FFFD.

        Raises:
            PromptError: an id outside the vocabulary.
        """
        self.check_ids(token_ids)
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """The text of every id on its own; like `[decode([i]) for i in token_ids]`, in one call to the library."""
        self.check_ids(token_ids)
        texts: list[str] = self._backend.decode_batch([[i] for i in token_ids], skip_special_tokens=False)
        return texts

    def id_of(self, token: str) -> int | None:
        """Id of a raw token string (byte-level alphabet, or the spelling of an added token); None if there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token_of(self, token_id: int) -> str:
        """Raw token string of an id. Raises PromptError for an id outside the vocabulary."""
        token: str | None = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise PromptError(f"token id: expected 0 <= id < {self.vocab_size}, got {token_id}")
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for. Joined over ids and read as UTF-8 they are `decode` of these ids.

        Raises:
            PromptError: an id outside the vocabulary.
        """
        found = self._bytes.get(token_id)
        if found is None:
            token = self.token_of(token_id)
            try:
                found = bytes([_BYTE_OF[char] for char in token])
            except KeyError:  # an added token spelled outside the byte-level alphabet
                found = token.encode()
            self._bytes[token_id] = found
        return found

    def check_ids(self, token_ids: Iterable[int], field: str = "token_ids") -> None:
        """Raise PromptError naming the first id outside the vocabulary, if any, by its place in `field`."""
        for number, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise PromptError(f"{field}[{number}]: expected ids 0 to {self.vocab_size - 1}, got {token_id}")

    @cached_property
    def control_token_ids(self) -> frozenset[int]:
        """Ids of all added tokens. Filter by these: the file's own `special` flag misses `<think>` and others."""
        return frozenset(self._backend.get_added_tokens_decoder())

    @property
    def json(self) -> str:
        """Text of the `tokenizer.json` this was made from."""
        return self._json

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same vocabulary without added tokens, so that nothing in a text can become one."""
        content = json.loads(self._json)
        content["added_tokens"] = []
        return tokenizers.Tokenizer.from_str(json.dumps(content))

    def _check(self, config: ModelConfig) -> None:
        found = self._backend.get_vocab_size(with_added_tokens=True)
        if found != config.vocab_size or self._backend.id_to_token(config.vocab_size - 1) is None:
            raise ConfigError(
                f"tokenizer.json: expected ids 0..{config.vocab_size - 1} (vocab_size of config.json), got {found} "
                "tokens; use the tokenizer of this checkpoint"
            )
        missing = [byte for char, byte in _BYTE_OF.items() if self._backend.token_to_id(char) is None]
        if missing:
            raise ConfigError(
                f"tokenizer.json: expected a byte-level vocabulary with all 256 bytes, missing {len(missing)}, "
                f"first {min(missing)}"
            )

    def _check_tokenizer_config(self, path: Path) -> None:
        if not path.exists():
            return
        try:
            declared = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: expected a JSON object, got {error}") from None
        for key, token_id in (("bos_token", self.bos_token_id), ("eos_token", self.eos_token_id)):
            token = declared.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and self.id_of(token) != token_id:
                raise ConfigError(f"{path}: {key} {token!r} has id {self.id_of(token)}, config.json says {token_id}; "
                                  "the two files belong to different checkpoints")  # fmt: skip


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable character: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
