"""Images: from a file, bytes or a data URL to patches and to the span of prompt positions they fill.

Nothing here touches the network. Sizes follow the published image processor exactly; the pixels depend on Pillow's
bicubic filter.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from leadline.config.model import VisionConfig
from leadline.config.token_types import TokenType
from leadline.errors import ImageError

MAX_IMAGE_BYTES = 32 << 20
MAX_IMAGE_PIXELS = 64 << 20  # 256 MiB as Pillow holds RGB, about 1 GiB while it decodes
# Raster formats only: Pillow also opens documents and runs external programs for some of them.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_GREY = (127, 127, 127)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizePlan:
    """Sizes of one image on its way into the model: pixels, patches and image tokens, each as height and width."""

    height: int
    width: int
    patch_rows: int
    patch_columns: int
    token_rows: int
    token_columns: int

    @property
    def num_tokens(self) -> int:
        """Prompt positions of the whole span: START, rows of IMAGE with one NEWLINE each, END."""
        return self.token_rows * (self.token_columns + 1) + 2

    def token_types(self) -> torch.Tensor:
        """The span's token types, [num_tokens] int64."""
        row = [TokenType.IMAGE] * self.token_columns + [TokenType.NEWLINE]
        return torch.tensor([TokenType.START, *(row * self.token_rows), TokenType.END], dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image ready for the tower. patches: [patch_rows * patch_columns, 3 * p * p] bf16, in reading order."""

    plan: ResizePlan
    patches: torch.Tensor


def load_image(source: str | Path | bytes) -> Image.Image:
    """Decode an image to RGB.

    Args:
        source: encoded bytes, a file path, or a `data:` URL (base64 or percent-encoded). No other URL is read.
    Edge cases: of an animation the first frame; alpha is dropped, orientation tags are ignored, as in the published
        processor. Of 16 bits a channel the upper 8 count, also in grey, which Pillow would make white.
    Raises:
        ImageError: unreadable, too many bytes or pixels, not one of PNG, JPEG, WebP, GIF, BMP, or an address on the
            network.
    """
    if isinstance(source, bytes):
        data, name = source, "image bytes"
    elif isinstance(source, str) and source[:5].lower() == "data:":
        data, name = _read_data_url(source), "image data URL"
    elif isinstance(source, str) and "://" in source[:12]:
        raise ImageError(f"image {source[:80]!r}: expected a path, bytes or a data URL, got an address on the network; "
                         "download it first")  # fmt: skip
    elif isinstance(source, str | Path):
        name = f"image {str(source)[:200]!r}"
        data = _read_file(Path(source), name)
    else:
        raise ImageError(f"image: expected a path, bytes or a data URL, got {type(source).__name__}")
    if len(data) > MAX_IMAGE_BYTES:
        raise ImageError(f"{name}: expected at most {MAX_IMAGE_BYTES} bytes, got more; send a smaller image")
    try:
        # Pillow warns of large images before we can look at their size, and of damage; a program may raise warnings.
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_IMAGE_PIXELS:
                raise ImageError(
                    f"{name}: expected at most {MAX_IMAGE_PIXELS} pixels, got {width} x {height}; scale it down"
                )
            if image.mode == "I;16":
                return image.point(lambda value: value / 256).convert("RGB")
            if isinstance(image.info.get("transparency"), bytes):  # of a palette: Pillow warns on the straight way
                return image.convert("RGBA").convert("RGB")
            return image.convert("RGB")
    except UnidentifiedImageError:
        raise ImageError(f"{name}: expected one of {', '.join(_FORMATS)}, got something else; convert it") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError, Warning) as error:
        raise ImageError(f"{name}: the image is damaged or too large: {error}") from None


def resize_plan(width: int, height: int, vision: VisionConfig) -> ResizePlan:
    """The size an image is brought to: at least `min_pixels`, at most `max_image_tokens` positions, whole patches.

    Args:
        width, height: of the original, at least 1.
    Numerics: exact integers; the intermediate square roots and quotients are Python floats in the published order.
    Raises:
        ImageError: a side below 1 pixel.
    Source: architecture.md 4.15, inference/image_processor.py.
    """
    if width < 1 or height < 1:
        raise ImageError(f"image: expected at least 1 x 1 pixels, got {width} x {height}")
    patch, cell = vision.patch_size, vision.patch_size * vision.downsample_ratio
    w: float = width
    h: float = height
    if vision.max_wh_ratio is not None and w > h * vision.max_wh_ratio:
        w = h * vision.max_wh_ratio
    if 0 < w * h < vision.min_pixels:
        enlarge = math.sqrt(vision.min_pixels / (w * h))
        w, h = int(w * enlarge), int(h * enlarge)
    plan = _whole_patches(math.ceil(w / patch) * patch, math.ceil(h / patch) * patch, vision)
    if plan.num_tokens <= vision.max_image_tokens:
        return plan
    # Too many: the largest token grid of the same shape. w and h solve (w + 1) h = budget with h = ratio * w.
    budget = vision.max_image_tokens - 2
    ratio = h / w
    grid_w = math.sqrt(budget / ratio + 0.25) - 0.5
    grid_h = grid_w * ratio
    if grid_w < 1:
        plan = _whole_patches(cell, budget // 2 * cell, vision)
    elif grid_h < 1:
        plan = _whole_patches((budget - 1) * cell, cell, vision)
    else:
        shrink = min(math.floor(grid_w) * cell / w, math.floor(grid_h) * cell / h)
        width, height = (math.floor(side * shrink / patch) * patch for side in (w, h))
        plan = _whole_patches(width, height, vision)
    assert plan.num_tokens <= vision.max_image_tokens
    return plan


def prepare_image(image: Image.Image, vision: VisionConfig) -> PreparedImage:
    """Resize, pad with grey and cut an RGB image into patches.

    Numerics: bytes / 255, then (x - 0.5) / 0.5 in float32, one rounding to bf16. Each patch is flattened channel-first.
    Raises:
        ImageError: from `resize_plan`.
    Source: architecture.md 4.15.
    """
    plan = resize_plan(image.width, image.height, vision)
    padded = ImageOps.pad(image, (plan.width, plan.height), color=_GREY)
    patch = vision.patch_size
    pixels = torch.from_numpy(np.array(padded, dtype=np.uint8))
    tiles = pixels.view(plan.patch_rows, patch, plan.patch_columns, patch, 3).permute(0, 2, 4, 1, 3)
    patches = tiles.reshape(plan.patch_rows * plan.patch_columns, 3 * patch * patch).float()
    return PreparedImage(plan, patches.div_(255).sub_(0.5).div_(0.5).bfloat16())


def expand_images(
    token_ids: Sequence[int], plans: Sequence[ResizePlan], image_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace each image placeholder of a prompt by the span of its image.

    Args:
        token_ids: the prompt with one `image_token_id` per image.
        plans: the images in the order of their placeholders.
    Returns: token ids [T] int64 and token types [T] int64 (-1 text). Every position of a span carries image_token_id.
    Edge cases: no images and no placeholders: the ids unchanged, all types -1; an empty prompt gives empty tensors.
    Raises:
        ImageError: the number of placeholders differs from the number of images.
    """
    placeholders = sum(token_id == image_token_id for token_id in token_ids)
    if placeholders != len(plans):
        raise ImageError(
            f"images: expected one per image token of the prompt ({placeholders}), got {len(plans)}; "
            f"an image is one token with id {image_token_id}"
        )
    ids: list[int] = []
    types: list[torch.Tensor] = []
    remaining = iter(plans)
    text_start = 0
    for token_id in token_ids:
        if token_id != image_token_id:
            ids.append(token_id)
            continue
        plan = next(remaining)
        types += [_text_types(len(ids) - text_start), plan.token_types()]
        ids += [image_token_id] * plan.num_tokens
        text_start = len(ids)
    types.append(_text_types(len(ids) - text_start))
    return torch.tensor(ids, dtype=torch.int64), torch.cat(types)


def _text_types(count: int) -> torch.Tensor:
    return torch.full((count,), TokenType.TEXT, dtype=torch.int64)


def _whole_patches(width: int, height: int, vision: VisionConfig) -> ResizePlan:
    rows, columns = height // vision.patch_size, width // vision.patch_size
    return ResizePlan(
        height=height,
        width=width,
        patch_rows=rows,
        patch_columns=columns,
        token_rows=math.ceil(rows / vision.downsample_ratio),
        token_columns=math.ceil(columns / vision.downsample_ratio),
    )


def content_ids(ids_T: torch.Tensor, types_T: torch.Tensor, images: Sequence[PreparedImage]) -> list[int]:
    """The ids of `expand_images`; inside images negative numbers made of what the image shows.

    For whoever compares prompts by their ids: two images of one size have the same token ids.
    """
    content_T = ids_T.clone()
    numbers = []
    for image in images:
        shape = f"{image.plan.token_rows} {image.plan.token_columns} ".encode()
        content = hashlib.shake_256(shape + image.patches.contiguous().view(torch.uint8).numpy().tobytes())
        digest = torch.frombuffer(bytearray(content.digest(8 * image.plan.num_tokens)), dtype=torch.int64)
        numbers.append(-1 - (digest & ((1 << 62) - 1)))
    content_T[types_T != -1] = torch.cat(numbers)
    return content_T.tolist()


def _read_file(path: Path, name: str) -> bytes:
    try:
        if path.exists() and not path.is_file():  # a pipe would wait, a device may never end
            raise ImageError(f"{name}: expected a file with an image, got something that is no plain file")
        with path.open("rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ImageError(f"{name}: expected a readable file, got {reason}") from None


def _read_data_url(url: str) -> bytes:
    header, comma, body = url.partition(",")
    # Three quarters of the base64 digits, or a third of a percent-encoded body, is the least it can decode to.
    if len(body) > 3 * MAX_IMAGE_BYTES:
        raise ImageError(
            f"image data URL: expected at most {MAX_IMAGE_BYTES} bytes, got a URL of {len(url)} characters"
        )
    if not comma:
        raise ImageError("image data URL: expected 'data:<type>;base64,<data>', got no comma")
    try:
        data = urllib.parse.unquote_to_bytes(body)
        return base64.b64decode(data, validate=True) if header.lower().endswith(";base64") else data
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"image data URL: expected base64 data, got {error}") from None
