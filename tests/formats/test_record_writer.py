import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.formats.records.encoding import frame_record
from ftrain.formats.records.index import index_records
from ftrain.formats.records.reading import read_records
from ftrain.formats.records.writing import RecordWriter

COMPRESSIONS = st.sampled_from([None, "GZIP", "ZLIB"])
LIMITS = st.none() | st.integers(1, 100)


def write(path, records, **options):
    with RecordWriter(path, **options) as writer:
        for record in records:
            writer.write(record)
    return writer.paths


def names(directory):
    return sorted(item.name for item in directory.iterdir())


@given(st.lists(st.binary(max_size=40)), COMPRESSIONS, LIMITS, LIMITS)
def test_what_is_written_is_read_back(
    tmp_path_factory, records, compression, shard_records, shard_bytes
):
    directory = tmp_path_factory.mktemp("records")
    options = {
        "compression": compression,
        "shard_records": shard_records,
        "shard_bytes": shard_bytes,
    }
    paths = write(directory / "deep" / "train.tfrecord", records, **options)
    shards = [list(read_records(path, compression=compression)) for path in paths]
    assert [record for shard in shards for record in shard] == records
    assert names(directory / "deep") == sorted(path.name for path in paths)
    if shard_records is None and shard_bytes is None:
        assert paths == [directory / "deep" / "train.tfrecord"]
    for n, (path, shard) in enumerate(zip(paths, shards, strict=True)):
        assert shard_records is None or len(shard) <= shard_records
        assert (
            shard_bytes is None
            or len(shard) == 1
            or sum(len(frame_record(r)) for r in shard) <= shard_bytes
        )
        assert shard or len(paths) == 1
        if len(paths) > 1:
            assert path.name == f"train-{n:05d}-of-{len(paths):05d}.tfrecord"


@pytest.mark.parametrize(
    ("name", "head"), [("a.tfrecord.gz", b"\x1f\x8b"), ("a.zlib", b"x"), ("a.tfrecord", b"\x03\0")]
)
def test_the_suffix_says_how_it_is_compressed(tmp_path, name, head):
    with RecordWriter(tmp_path / name) as writer:
        writer.write(b"abc")
    assert (tmp_path / name).read_bytes().startswith(head)
    assert list(read_records(tmp_path / name)) == [b"abc"]
    with RecordWriter(tmp_path / "plain.gz", compression=None) as writer:
        writer.write(b"abc")
    assert (tmp_path / "plain.gz").read_bytes().startswith(b"\x03\0")


@pytest.mark.parametrize("options", [{}, {"shard_records": 5}])
def test_two_writers_do_not_mix_up_their_files(tmp_path, options):
    path = tmp_path / "train.tfrecord"
    with RecordWriter(path, **options) as writer:
        writer.write(b"old")
    first = RecordWriter(path, overwrite=True, **options)
    first.write(b"first")
    with pytest.raises(FileExistsError, match="is being written by another writer"):
        RecordWriter(path, overwrite=True, **options)
    first.close()
    assert list(read_records(first.paths[0])) == [b"first"]
    again = RecordWriter(path, overwrite=True, **options)  # the lock is free again
    again.write(b"again")
    first.discard()  # too late to discard anything
    again.close()
    assert list(read_records(again.paths[0])) == [b"again"]
    abandoned = RecordWriter(path, overwrite=True, **options)
    abandoned._file.close()
    abandoned._lock.close()
    with RecordWriter(path, overwrite=True, **options):
        pass


def test_what_is_discarded_leaves_what_was_there(tmp_path):
    path = tmp_path / "train.tfrecord"
    with RecordWriter(path) as writer:
        writer.write(b"old")
    again = RecordWriter(path, overwrite=True)
    again.write(b"new")
    again.discard()
    assert list(read_records(path)) == [b"old"]
    assert list(tmp_path.iterdir()) == [path]


def test_suffixes_stay_at_the_end(tmp_path):
    for name, shard in [
        ("train.tfrecord", "train-00000-of-00001.tfrecord"),
        ("train.tfrecord.gz", "train-00000-of-00001.tfrecord.gz"),
        ("v1.2.records", "v1.2-00000-of-00001.records"),
        ("train", "train-00000-of-00001"),
    ]:
        assert write(tmp_path / name, [b"x"], shard_records=2) == [tmp_path / shard]


def test_bytes_of_any_kind_are_written_and_nothing_else(tmp_path):
    with RecordWriter(tmp_path / "records") as writer:
        writer.write(bytearray(b"one"))
        writer.write(memoryview(b"two"))
        for wrong in ("text", None, 3, [1, 2]):
            with pytest.raises(TypeError, match="must be bytes, got"):
                writer.write(wrong)
    assert list(read_records(tmp_path / "records")) == [b"one", b"two"]


def test_a_closed_writer_takes_no_more(tmp_path):
    writer = RecordWriter(tmp_path / "records")
    assert writer.paths == []
    writer.close()
    writer.close()
    assert writer.paths == [tmp_path / "records"]
    with pytest.raises(ValueError, match="the writer is closed"):
        writer.write(b"late")


def leave_by_error(path, **options):
    with RecordWriter(path, **options) as writer:
        for record in (b"one", b"two", b"three"):
            writer.write(record)
        raise InterruptedError


def test_what_is_not_complete_gets_no_name_and_stays(tmp_path):
    with pytest.raises(InterruptedError):
        leave_by_error(tmp_path / "a.tfrecord")
    with pytest.raises(InterruptedError):
        leave_by_error(tmp_path / "b.tfrecord", shard_records=2)
    assert names(tmp_path) == [
        "a.tfrecord.writing",
        "b-00000.tfrecord.writing",
        "b-00001.tfrecord.writing",
    ]
    assert list(read_records(tmp_path / "b-00000.tfrecord.writing")) == [b"one", b"two"]
    write(tmp_path / "a.tfrecord", [b"x"])
    write(tmp_path / "b.tfrecord", [b"x"], shard_records=2)
    assert names(tmp_path) == ["a.tfrecord", "b-00000-of-00001.tfrecord"]


def test_a_write_that_failed_is_not_forgotten(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    writer = RecordWriter(tmp_path / "records")
    monkeypatch.setattr(writer, "_output", type("Full", (), {"write": staticmethod(fail)}))
    with pytest.raises(OSError, match="No space"):
        writer.write(b"one")
    with pytest.raises(ValueError, match="not complete, as a write failed"):
        writer.close()
    assert names(tmp_path) == ["records.writing"]


def test_a_file_that_exists_is_replaced_only_if_asked_and_only_when_complete(tmp_path):
    path = tmp_path / "train.tfrecord"
    write(path, [b"old"])
    with pytest.raises(
        FileExistsError, match=re.escape(f"{path}: exists already; pass overwrite=True")
    ):
        RecordWriter(path)
    with pytest.raises(InterruptedError):
        leave_by_error(path, overwrite=True)
    assert list(read_records(path)) == [b"old"]
    write(path, [b"new"], overwrite=True)
    assert list(read_records(path)) == [b"new"]


def test_shards_of_an_earlier_write_are_not_mixed_with_new_ones(tmp_path):
    path = tmp_path / "train.tfrecord"
    old = write(path, [b"old"] * 3, shard_records=1)
    write(tmp_path / "train-more.tfrecord", [b"other"])
    write(path, [b"source"])  # one file and its shards may lie side by side
    with pytest.raises(
        FileExistsError, match=r"train-00000-of-00003.tfrecord and 2 more: exists already"
    ):
        RecordWriter(path, shard_records=2)
    with RecordWriter(path, shard_records=1, overwrite=True) as writer:
        writer.write(b"new")
        writer.write(b"new")
        assert all(shard.exists() for shard in old)
    new = ["train-00000-of-00002.tfrecord", "train-00001-of-00002.tfrecord"]
    assert names(tmp_path) == [*new, "train-more.tfrecord", "train.tfrecord"]
    assert [list(read_records(shard)) for shard in writer.paths] == [[b"new"], [b"new"]]


def test_the_index_of_a_replaced_file_goes(tmp_path):
    path = tmp_path / "train.tfrecord"
    write(path, [b"old"])
    index_records(path)
    assert (tmp_path / "train.tfrecord.index").exists()
    write(path, [b"new"], overwrite=True)
    assert names(tmp_path) == ["train.tfrecord"]
    for shard in write(path, [b"a", b"b"], shard_records=1):
        index_records(shard)
    write(path, [b"c"], shard_records=1, overwrite=True)
    assert names(tmp_path) == ["train-00000-of-00001.tfrecord", "train.tfrecord"]


def test_a_file_that_is_called_like_an_index_but_is_none_stays(tmp_path):
    (tmp_path / "model.index").write_bytes(b"of a checkpoint")
    write(tmp_path / "model", [b"x"])
    assert (tmp_path / "model.index").read_bytes() == b"of a checkpoint"


def test_no_record_at_all_is_an_empty_file(tmp_path):
    assert list(read_records(*write(tmp_path / "a", []))) == []
    assert write(tmp_path / "b", [], shard_bytes=5) == [tmp_path / "b-00000-of-00001"]
    assert os.path.getsize(tmp_path / "b-00000-of-00001") == 0


@pytest.mark.parametrize(
    "options", [{"compression": "zip"}, {"shard_records": 0}, {"shard_bytes": -1}]
)
def test_options_that_make_no_sense_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        RecordWriter(tmp_path / "records", **options)


def test_a_directory_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match="give the name of a file in it"):
        RecordWriter(tmp_path, overwrite=True)


def test_ctrl_c_before_the_first_record_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(writer):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RecordWriter, "_begin_shard", interrupt)
        with pytest.raises(KeyboardInterrupt):
            RecordWriter(tmp_path / "x.tfrecord")
    assert not list(tmp_path.iterdir())
    with RecordWriter(tmp_path / "x.tfrecord") as writer:  # its lock is free
        writer.write(b"x")
    assert (tmp_path / "x.tfrecord").exists()
