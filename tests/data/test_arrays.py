import contextlib
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.data import ArraySource

ARRAYS = {
    "x": np.arange(24, dtype=np.float32).reshape(12, 2),
    "label": np.arange(12, dtype=np.int16),
}
INDICES = np.array([11, 0, 5])


def check(source: ArraySource, arrays=ARRAYS) -> None:
    read = source.read(INDICES)
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array[INDICES])
        assert read[name].dtype == array.dtype


def test_an_npz_file_is_mapped_where_its_arrays_lie(tmp_path):
    np.savez(tmp_path / "data.npz", **ARRAYS)
    source = ArraySource.open(tmp_path / "data.npz")
    assert all(
        isinstance(array.base, np.memmap) or isinstance(array, np.memmap)
        for array in source.arrays.values()
    )
    check(source)


def test_a_compressed_npz_file_is_read(tmp_path):
    np.savez_compressed(tmp_path / "data.npz", **ARRAYS)
    check(ArraySource.open(tmp_path / "data.npz"))


def test_npy_files_alone_and_by_name(tmp_path):
    for name, array in ARRAYS.items():
        np.save(tmp_path / f"{name}.npy", np.asfortranarray(array))
    check(ArraySource.open({name: tmp_path / f"{name}.npy" for name in ARRAYS}))
    check(ArraySource.open(tmp_path / "x.npy"), {"x": ARRAYS["x"]})


def test_empty_arrays_are_no_accident(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.zeros((0, 3)))
    assert len(ArraySource.open(tmp_path / "data.npz")) == 0


def test_worker_processes_map_the_files_anew(tmp_path):
    np.savez(tmp_path / "data.npz", **ARRAYS)
    sent = pickle.dumps(ArraySource.open(tmp_path / "data.npz"))
    assert len(sent) < 500
    check(pickle.loads(sent))


@pytest.mark.parametrize("content", [b"", b"PK", b"\x93NUMPY", b"hello"])
def test_other_files_are_refused_by_name(tmp_path, content):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.npy cannot be mapped as an \.npy file"):
        ArraySource.open(tmp_path / "x.npy")


def test_objects_are_refused(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.array([None, "a"], object))
    with pytest.raises(
        ValueError, match=r"data\.npz: array x\.npy cannot be read: it holds Python objects"
    ):
        ArraySource.open(tmp_path / "data.npz")


@given(st.data())
def test_a_damaged_archive_is_an_error_or_reads_something(tmp_path_factory, data):
    """A mapped read checks no checksum of a stored array, so only a damaged structure is found."""
    path = tmp_path_factory.mktemp("damaged") / "data.npz"
    data.draw(st.sampled_from([np.savez, np.savez_compressed]))(path, **ARRAYS)
    whole = bytearray(path.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(ValueError):
        len(ArraySource.open(path))


def test_a_mapped_file_that_shrinks_does_not_kill_the_process(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((100_000, 10)))
    source = ArraySource.open(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.ones((10, 10)))
    with pytest.raises(ValueError, match=r"x\.npy was changed while in use"):
        source.read(np.array([99_999]))
