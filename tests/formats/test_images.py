import io
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow

from ftrain.formats.examples.features import Image, SpecError
from ftrain.formats.examples.messages import encode_example
from ftrain.formats.examples.parsing import parse_examples

GRAY = np.arange(20, dtype=np.uint8).reshape(4, 5) * 12
COLOR = np.stack([GRAY, GRAY[::-1], 255 - GRAY], axis=-1)


def encode(image, format="PNG", **options):
    file = io.BytesIO()
    (image if isinstance(image, Pillow.Image) else Pillow.fromarray(image)).save(
        file, format, **options
    )
    return file.getvalue()


def parse(data, shape):
    return parse_examples([encode_example({"image": data})], {"image": Image(shape)})["image"][0]


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, *chunks):
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
        + b"".join(chunks)
    )


def test_png_is_exact():
    np.testing.assert_array_equal(parse(encode(GRAY), (4, 5, 1)), GRAY[..., None])
    np.testing.assert_array_equal(parse(encode(COLOR), (4, 5, 3)), COLOR)
    alpha = np.concatenate([COLOR, GRAY[..., None]], axis=-1)
    np.testing.assert_array_equal(parse(encode(alpha), (4, 5, 4)), alpha)
    np.testing.assert_array_equal(parse(encode(alpha), (4, 5, 3)), COLOR)
    np.testing.assert_array_equal(parse(encode(GRAY), (4, 5, 3)), np.stack([GRAY] * 3, axis=-1))


def test_jpeg_is_close():
    smooth = np.add.outer(np.arange(32), np.arange(48)).astype(np.uint8)
    pixels = parse(encode(smooth, "JPEG", quality=95), (32, 48, 1))
    assert pixels.dtype == np.uint8
    assert np.abs(pixels[..., 0].astype(int) - smooth).max() <= 3
    assert parse(encode(Pillow.fromarray(COLOR).convert("CMYK"), "JPEG"), (4, 5, 3)).shape == (
        4,
        5,
        3,
    )


def test_other_modes():
    palette = Pillow.fromarray(COLOR).quantize(8)
    wanted = np.asarray(palette.convert("RGB"))
    np.testing.assert_array_equal(parse(encode(palette), (4, 5, 3)), wanted)
    np.testing.assert_array_equal(
        parse(encode(palette, transparency=bytes(range(8))), (4, 5, 3)), wanted
    )
    assert parse(encode(palette, transparency=bytes(range(8))), (4, 5, 4))[..., 3].max() < 8
    deep = GRAY.astype(np.uint16) * 256 + 200
    np.testing.assert_array_equal(parse(encode(deep), (4, 5, 1))[..., 0], GRAY)
    bits = Pillow.fromarray(GRAY).convert("1")
    np.testing.assert_array_equal(
        parse(encode(bits), (4, 5, 1))[..., 0], np.asarray(bits) * np.uint8(255)
    )


def test_a_batch():
    records = [encode_example({"image": encode(COLOR + number)}) for number in range(30)]
    images = parse_examples(records, {"image": Image((4, 5, 3))})["image"]
    np.testing.assert_array_equal(images, np.stack([COLOR + number for number in range(30)]))


def test_another_size_is_an_error_with_both():
    with pytest.raises(
        SpecError,
        match=r"record 0: feature image holds an image of 4 x 5 .*, expected 5 x 4; resize",
    ):
        parse(encode(GRAY), (5, 4, 1))


@pytest.mark.parametrize("data", [b"", b"no image", b"GIF89a" + bytes(50)], ids=str)
def test_other_bytes_are_no_image(data):
    with pytest.raises(
        SpecError, match=r"record 0: feature image has \d+ bytes that are not a PNG or JPEG image"
    ):
        parse(data, (4, 5, 3))


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_every_cut_of_an_image_is_an_error(format):
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    data = encode(noise, format)
    whole = len(data) - (14 if format == "PNG" else 2)  # the end marker is not needed
    for size in [*range(0, whole - 8, 7), whole - 9]:
        with pytest.raises(SpecError, match=r"record 0: feature image has \d+ bytes"):
            parse(data[:size], (16, 16, 3))


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_damaged_images_are_errors_or_other_pixels(format):
    rng = np.random.default_rng(0)
    data = encode(rng.integers(0, 256, (8, 8, 3), np.uint8), format)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        try:
            assert parse(bytes(damaged), (8, 8, 3)).shape == (8, 8, 3)
        except SpecError:
            continue


def test_a_bomb_is_refused_by_its_declared_size():
    rows = zlib.compress(bytes(10**6), 9) * 20
    with pytest.raises(SpecError, match=r"holds an image of 60000 x 60000"):
        parse(png(60_000, 60_000, chunk(b"IDAT", rows), chunk(b"IEND", b"")), (4, 5, 3))


def test_odd_files_give_no_warnings():
    animated = chunk(b"acTL", struct.pack(">II", 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"\0\1\2\0\3\4")) + chunk(b"IEND", b"")
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x1a\x01\x05\0\x01\0\0\0\xff\xff\xff\x7f"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse(png(2, 2, animated, pixels), (2, 2, 1)).ravel().tolist() == [1, 2, 3, 4]
        assert parse(encode(COLOR, "JPEG", exif=exif), (4, 5, 3)).shape == (4, 5, 3)


def test_without_pillow_the_error_says_what_to_install():
    code = """
import sys
sys.modules["PIL"] = None
from ftrain.formats.examples.messages import encode_example
from ftrain.formats.examples.features import Image
from ftrain.formats.examples.parsing import parse_examples
try:
    parse_examples([encode_example({"x": b"\\x89PNG\\r\\n\\x1a\\n"})], {"x": Image((1, 1, 1))})
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'ftrain[images]'" in done.stdout


def test_pillow_is_imported_only_for_images():
    code = "import sys, ftrain.formats.examples.parsing; print('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
