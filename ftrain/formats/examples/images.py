"""Images: PNG and JPEG bytes as arrays of pixels, through Pillow."""

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
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
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
_MOST_PIXELS = 1 << 26  # below the number from which Pillow suspects a decompression bomb


def check_image_shape(shape: Any) -> None:
    sizes: tuple[Any, ...] = tuple(shape) if isinstance(shape, tuple | list) else ()
    whole = len(sizes) == 3 and all(type(size) is int and size > 0 for size in sizes)
    if not whole or sizes[2] not in _MODES or sizes[0] * sizes[1] > _MOST_PIXELS:
        wanted = f"wanted (height, width, channels) with 1, 3 or 4 channels and up to {_MOST_PIXELS} pixels"
        raise ValueError(f"an image's shape is {shape!r}, {wanted}")


def decode_image(data: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """The pixels, uint8, of `shape` (height, width, channels); ValueError if they are not that many, or no image.

    Its declared size is compared before anything is decoded, so a small file cannot fill the memory.
    """
    height, width, channels = shape
    kind = _image_class(data)
    with _quiet(data):
        try:
            image = kind(io.BytesIO(data))
            is_wanted = image.size == (width, height)
            pixels = _pixels(image, _MODES[channels]) if is_wanted else None
        except _DAMAGE as error:
            raise ValueError(
                f"has {len(data)} bytes of an image that is damaged: {error}"
            ) from None
    if pixels is None:
        found = f"holds an image of {image.size[1]} x {image.size[0]} (height x width)"
        raise ValueError(
            f"{found}, wanted {height} x {width}; resize images before they are written"
        )
    return pixels.reshape(shape)


def _image_class(data: bytes) -> Any:
    """The class that reads a format, since the function for all formats warns of odd files."""
    if data.startswith(_PNG):
        return _classes()[0]
    if data.startswith(_JPEG):
        return _classes()[1]
    raise ValueError(
        f"has {len(data)} bytes that are no PNG or JPEG image: they begin with {data[:8]!r}"
    )


@functools.cache
def _classes() -> tuple[Any, Any]:
    try:
        from PIL import JpegImagePlugin, PngImagePlugin
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "images are decoded by Pillow: pip install 'ftrain[images]'", name="PIL"
        ) from None

    class JpegFile(JpegImagePlugin.JpegImageFile):
        def getexif(self) -> Any:  # read for the resolution only, with warnings if it is damaged
            raise KeyError("EXIF is not read")

    return PngImagePlugin.PngImageFile, JpegFile


def _pixels(image: Any, mode: str) -> np.ndarray:
    image.load()
    if image.mode.startswith("I"):  # 16 bits, of which the upper ones are kept, as in other modes
        from PIL import Image

        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if mode != "RGBA":
        image.info.pop("transparency", None)  # of whose loss Pillow would warn
    return np.asarray(image.convert(mode))


@contextlib.contextmanager
def _quiet(data: bytes) -> Iterator[None]:
    """Without warnings where there may be one: animations. Filters belong to all threads, hence the lock."""
    if b"acTL" not in data:
        yield
        return
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
