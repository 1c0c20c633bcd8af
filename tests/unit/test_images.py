"""Images: decoding, limits, resize plans, placeholders."""

from __future__ import annotations

import base64
import dataclasses
import io
import os
import random
import struct
import urllib.parse
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from leadline.config.model import VisionConfig, read_config
from leadline.errors import ImageError
from leadline.model.vision import span_rows
from leadline.text import images
from leadline.text.images import content_ids, expand_images, load_image, prepare_image, resize_plan

pytestmark = pytest.mark.unit

RELEASED = read_config(Path(__file__).parent.parent / "golden" / "released_config.json")
assert RELEASED.vision is not None
VISION: VisionConfig = RELEASED.vision
IMAGE = RELEASED.image_token_id


def png(width: int = 5, height: int = 3, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.effect_noise((width, height), 60).convert(mode).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("size", "pixels", "patches", "grid", "tokens"),
    [
        ((224, 224), (546, 546), (39, 39), (13, 13), 184),
        ((1024, 768), (1036, 770), (74, 55), (25, 19), 496),
        ((1920, 1080), (1708, 966), (122, 69), (41, 23), 968),
        ((1344, 1344), (1302, 1302), (93, 93), (31, 31), 994),
        ((4000, 3000), (1512, 1134), (108, 81), (36, 27), 1001),
    ],
)
def test_published_table(
    size: tuple[int, int], pixels: tuple[int, int], patches: tuple[int, int], grid: tuple[int, int], tokens: int
) -> None:
    plan = resize_plan(*size, VISION)
    assert (plan.width, plan.height) == pixels
    assert (plan.patch_columns, plan.patch_rows) == patches
    assert (plan.token_columns, plan.token_rows) == grid
    assert plan.num_tokens == tokens == len(plan.token_types())


SIDES = st.integers(1, 5000) | st.integers(1, 10**7)


@given(SIDES, SIDES, st.sampled_from([None, 3, 1.5]))
def test_every_size_fits(width: int, height: int, ratio: float | None) -> None:
    plan = resize_plan(width, height, dataclasses.replace(VISION, max_wh_ratio=ratio))
    assert 5 <= plan.num_tokens <= VISION.max_image_tokens
    assert plan.patch_rows * 14 == plan.height > 0
    assert plan.patch_columns * 14 == plan.width > 0
    types = plan.token_types().tolist()
    assert [types.count(kind) for kind in range(4)] == [1, plan.token_rows * plan.token_columns, plan.token_rows, 1]


def test_very_thin_images() -> None:
    column, row = resize_plan(1, 10**6, VISION), resize_plan(10**6, 1, VISION)
    assert (column.token_rows, column.token_columns, column.num_tokens) == (511, 1, 1024)
    assert (row.token_rows, row.token_columns, row.num_tokens) == (1, 1021, 1024)
    with pytest.raises(ImageError, match="0 x 4"):
        resize_plan(0, 4, VISION)


def test_patches_are_channel_first_in_reading_order() -> None:
    # 546 x 546 after enlarging: left half red, right half black; no padding, as the shape is kept.
    image = Image.new("RGB", (546, 546))
    image.paste((255, 0, 0), (0, 0, 280, 546))
    prepared = prepare_image(image, VISION)
    assert prepared.patches.shape == (39 * 39, 588)
    patches = prepared.patches.view(39, 39, 3, 14, 14)
    assert (patches[:, :20, 0] == 1).all()
    assert (patches[:, 20:, 0] == -1).all()
    assert (patches[:, :, 1:] == -1).all()


def test_padding_is_grey_and_centred() -> None:
    prepared = prepare_image(Image.new("RGB", (1000, 100), (255, 255, 255)), VISION)
    rows = prepared.patches.view(prepared.plan.patch_rows, prepared.plan.patch_columns, 3, 14, 14)
    column = rows[:, 10, 0, :, 0].flatten()
    padding = column == torch.tensor((127 / 255 - 0.5) / 0.5).bfloat16()
    assert 0 < padding.sum() < 14
    assert (padding == padding.flip(0)).float().mean() > 0.95
    assert not padding[padding.shape[0] // 2]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "1", "P", "LA"])
def test_sources_and_modes(tmp_path: Path, mode: str) -> None:
    data = png(mode=mode)
    path = tmp_path / "a b.png"
    path.write_bytes(data)
    encoded = "data:image/png;base64," + base64.b64encode(data).decode()
    escaped = "data:image/png," + urllib.parse.quote_from_bytes(data)
    for source in (data, path, str(path), encoded, escaped):
        image = load_image(source)
        assert (image.size, image.mode) == ((5, 3), "RGB")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.org/a.png", "network"),
        ("file:///etc/hostname", "network"),
        ("/no/such/file.png", "readable file"),
        ("a\0b", "readable file"),
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,@@@", "base64"),
        ("data:image/png;base64,\ud800", "base64"),
        ("/dev/zero", "no plain file"),
        ("", "no plain file"),
        (bytearray(png()), "expected a path, bytes or a data URL, got bytearray"),
        (None, "expected a path, bytes or a data URL, got NoneType"),
        (b"", "expected one of PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "expected one of PNG"),
        (png(50, 50)[:500], "damaged"),
    ],
)
def test_unreadable(source: str | bytes, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        load_image(source)


def test_a_pipe_is_refused_and_messages_stay_short(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ImageError, match="no plain file"):
        load_image(tmp_path / "pipe")  # reading it would wait for a writer
    for long in ("x" * 100_000, b"x" * 100_000, "data:image/png;base64," + "@" * 100_000):
        with pytest.raises(ImageError) as caught:
            load_image(long)
        assert len(str(caught.value)) < 400


def test_the_scheme_of_a_data_url_may_be_in_capitals() -> None:
    encoded = base64.b64encode(png()).decode()
    assert load_image(f"DATA:image/png;BASE64,{encoded}").size == (5, 3)


def test_sixteen_bits_of_grey_keep_the_upper_eight() -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    assert np.array(load_image(buffer.getvalue()))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_a_palette_with_alpha_drops_it() -> None:
    """The test run makes errors of warnings, and Pillow warns of such a palette."""
    buffer = io.BytesIO()
    picture = Image.new("P", (4, 4), 1)
    picture.putpalette([9, 9, 9, 10, 20, 30])
    picture.save(buffer, "PNG", transparency=bytes([255, 128]))
    assert load_image(buffer.getvalue()).getpixel((0, 0)) == (10, 20, 30)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damage_is_one_error_of_ours(form: str) -> None:
    """Cut off anywhere, or with a changed byte: an image or an ImageError, and no other exception."""
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x112] = 6
    extra = {"exif": exif} if form in ("PNG", "JPEG", "WEBP") else {}
    Image.effect_noise((16, 16), 50).convert("RGB").save(buffer, form, **extra)
    data, refused = buffer.getvalue(), 0
    chosen = random.Random(3)
    for cut in range(0, len(data), 7):
        changed = bytearray(data)
        changed[chosen.randrange(64)] ^= 1 << chosen.randrange(8)
        for damaged in (data[:cut], bytes(changed)):
            try:
                assert load_image(damaged).mode == "RGB"
            except ImageError:
                refused += 1
    assert refused > len(data) // 20


def test_a_bomb_is_refused_from_its_header() -> None:
    """Neither of Pillow's own limits speaks first, though warnings are errors here."""
    for side, words in ((9000, "at most 67108864 pixels"), (12_000, "too large"), (20_000, "too large")):
        head = bytearray(png(1, 1))
        head[16:24] = struct.pack(">II", side, side)
        head[29:33] = struct.pack(">I", zlib.crc32(head[12:29]))
        with pytest.raises(ImageError, match=words):
            load_image(bytes(head))


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(100, 50)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    encoded = "data:image/png;base64," + base64.b64encode(data).decode()
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 5000)
    assert load_image(data).size == (100, 50)
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 4999)
    with pytest.raises(ImageError, match="4999 pixels, got 100 x 50"):
        load_image(data)
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", len(data) - 1)
    for source in (data, path, encoded):
        with pytest.raises(ImageError, match=f"{len(data) - 1} bytes, got more"):
            load_image(source)
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 10)
    with pytest.raises(ImageError, match="10 bytes, got a URL"):
        load_image(encoded)


def test_expand() -> None:
    small, wide = resize_plan(600, 600, VISION), resize_plan(1000, 100, VISION)
    ids, types = expand_images([0, IMAGE, 7, 8, IMAGE], [small, wide], IMAGE)
    first, second = small.num_tokens, wide.num_tokens
    assert ids.dtype == types.dtype == torch.int64
    assert ids.tolist() == [0, *[IMAGE] * first, 7, 8, *[IMAGE] * second]
    assert types.tolist() == [-1, *small.token_types().tolist(), -1, -1, *wide.token_types().tolist()]
    assert [t.tolist() for t in expand_images([], [], IMAGE)] == [[], []]
    assert [t.tolist() for t in expand_images([5], [], IMAGE)] == [[5], [-1]]
    for prompt, plans in (([5], [small]), ([IMAGE], []), ([IMAGE, IMAGE], [small])):
        with pytest.raises(ImageError, match="one per image token"):
            expand_images(prompt, plans, IMAGE)


def test_content_ids_tell_images_apart() -> None:
    def content(*pictures: Image.Image) -> list[list[int]]:
        """The content ids inside each image of one prompt."""
        prepared = [prepare_image(picture, VISION) for picture in pictures]
        prompt = [7] + [IMAGE, 8] * len(prepared)
        ids_T, types_T = expand_images(prompt, [image.plan for image in prepared], IMAGE)
        found = content_ids(ids_T, types_T, prepared)
        assert len(found) == len(ids_T)
        assert [i for i in found if i >= 0] == [7] + [8] * len(prepared)
        ends = [place for place, i in enumerate(found) if i == 8]
        return [found[a + 1 : b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    grey = Image.new("RGB", (800, 400), (127, 127, 127))
    dotted = grey.copy()
    dotted.paste((0, 0, 0), (400, 200, 440, 240))
    a, b, c = content(grey, dotted, grey)
    assert a == c
    assert len(a) == len(b)
    assert all(x != y for x, y in zip(a, b, strict=True))
    assert content(dotted) == [b]
    (turned,) = content(grey.rotate(90, expand=True))  # the same patches in another shape
    assert all(x != y for x, y in zip(a, turned, strict=False))


def test_span_rows() -> None:
    types = torch.tensor([-1, 0, 1, 1, 2, 3, -1, 0, 1, 2, 3])
    aligned = torch.arange(6, dtype=torch.bfloat16).view(3, 2)
    start, newline, end = (torch.full((2,), float(v), dtype=torch.bfloat16) for v in (10, 20, 30))
    rows = span_rows(aligned, types, start, newline, end)
    assert rows.dtype == torch.bfloat16
    assert rows[:, 0].tolist() == [10, 0, 2, 20, 30, 10, 4, 20, 30]
    assert span_rows(aligned[:0], types[:1], start, newline, end).shape == (0, 2)
