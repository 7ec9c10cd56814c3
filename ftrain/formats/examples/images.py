"""Images: PNG and JPEG bytes as arrays of pixels, decoded by Pillow."""

import contextlib
import functools
import io
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
PNG = b"\x89PNG\r\n\x1a\n"
JPEG = b"\xff\xd8\xff"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 4, 6: 4}  # by the colour type; a palette's colours are RGB
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
)
_LOCK = threading.Lock()
_MAX_PIXELS = 1 << 26  # below the number at which Pillow suspects a decompression bomb


def check_image_shape(shape: Any) -> None:
    """Raise ValueError unless the shape is (height, width, channels) of a supported image."""
    sizes: tuple[Any, ...] = tuple(shape) if isinstance(shape, tuple | list) else ()
    whole = len(sizes) == 3 and all(type(size) is int and size > 0 for size in sizes)
    if not whole or sizes[2] not in _MODES or sizes[0] * sizes[1] > _MAX_PIXELS:
        raise ValueError(
            "the shape of an image must be (height, width, channels) with 1, 3 or 4 channels "
            f"and at most {_MAX_PIXELS} pixels, got {shape!r}"
        )


def decode_image(data: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """Return the pixels, uint8 of `shape` (height, width, channels); ValueError if they do not fit.

    The declared size is compared before decoding, so a small file cannot fill the memory.
    """
    height, width, channels = shape
    kind = _image_class(data)
    with _quiet(data):
        try:
            image = kind(io.BytesIO(data))
            has_size = image.size == (width, height)
            pixels = _pixels(image, _MODES[channels]) if has_size else None
        except _DAMAGE as error:
            raise ValueError(f"has {len(data)} bytes of a damaged image: {error}") from None
    if pixels is None:
        found = f"holds an image of {image.size[1]} x {image.size[0]} (height x width)"
        raise ValueError(f"{found}, expected {height} x {width}; resize images before writing them")
    return pixels.reshape(shape)


def image_shape(data: bytes) -> tuple[int, int, int] | None:
    """Return height, width and channels from the head of a PNG or JPEG file; None if missing."""
    if data.startswith(PNG):
        if len(data) < 26:
            return None
        width, height, _, colours = struct.unpack_from(">IIBB", data, 16)
        shape = height, width, _PNG_CHANNELS.get(colours, 0)
    else:
        shape = next(_jpeg_frames(data), (0, 0, 0))
    return shape if all(shape) else None


def _image_class(data: bytes) -> Any:
    """Return Pillow's class of the format; `PIL.Image.open` would warn about unusual files."""
    if data.startswith(PNG):
        return _pillow_classes()[0]
    if data.startswith(JPEG):
        return _pillow_classes()[1]
    raise ValueError(
        f"has {len(data)} bytes that are not a PNG or JPEG image: they start with {data[:8]!r}"
    )


@functools.cache
def _pillow_classes() -> tuple[Any, Any]:
    try:
        from PIL import JpegImagePlugin, PngImagePlugin
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "decoding images needs Pillow: pip install 'ftrain[images]'", name="PIL"
        ) from None

    class JpegFile(JpegImagePlugin.JpegImageFile):
        def getexif(self) -> Any:  # only for the resolution, and warns if damaged
            raise KeyError("EXIF is not read")

    return PngImagePlugin.PngImageFile, JpegFile


def _pixels(image: Any, mode: str) -> np.ndarray:
    image.load()
    if image.mode.startswith("I"):  # 16 bits: keep the upper 8, as other modes do
        from PIL import Image

        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if mode != "RGBA":
        image.info.pop("transparency", None)  # Pillow would warn about its loss
    return np.asarray(image.convert(mode))


@contextlib.contextmanager
def _quiet(data: bytes) -> Iterator[None]:
    """Suppress warnings about animations, under a lock: filters are global to all threads."""
    if b"acTL" not in data:
        yield
        return
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _jpeg_frames(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the shapes in the frame headers of a JPEG file; an image has one."""
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, length = struct.unpack_from(">BH", data, at + 1)
        # 0xC4, 0xC8 and 0xCC are in the range of frame markers, but mark tables.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width, components = struct.unpack_from(">HHB", data, at + 5)
            yield height, width, 1 if components == 1 else 3
        at += 2 + length
