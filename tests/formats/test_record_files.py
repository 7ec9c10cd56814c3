import gzip
import os
import subprocess
import sys
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.formats.records import files as record_files
from ftrain.formats.records.encoding import DamagedRecordError, frame_record
from ftrain.formats.records.files import RecordFiles
from ftrain.formats.records.reading import read_records

SHARDS = [[b"", b"one", b"two"], [], [b"x" * 300], [b"four", b"y" * 10_000, b"six"]]
RECORDS = [record for shard in SHARDS for record in shard]


def write_shards(directory, shards, pack=bytes):
    for n, shard in enumerate(shards):
        (directory / f"train-{n:05d}.tfrecord").write_bytes(
            pack(b"".join(map(frame_record, shard)))
        )
    return str(directory / "train-*.tfrecord")


def write(path, records):
    path.write_bytes(b"".join(map(frame_record, records)))
    return path


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    status = os.stat(path)
    path.write_bytes(bytes(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@given(st.lists(st.lists(st.binary(max_size=60), max_size=6), min_size=1, max_size=4), st.data())
def test_any_numbers_in_any_order(tmp_path_factory, shards, data):
    files = RecordFiles(write_shards(tmp_path_factory.mktemp("files"), shards))
    records = [record for shard in shards for record in shard]
    assert len(files) == len(records)
    assert files.read(range(len(files))) == records
    if records:
        numbers = data.draw(st.lists(st.integers(0, len(records) - 1)))
        wanted = [records[n] for n in numbers]
        assert files.read(numbers) == files.read(np.array(numbers, np.int32)) == wanted


def test_lengths_near_each_other_and_far_apart(tmp_path, rng):
    for longest in (10, 500, 50_000):
        records = [rng.bytes(int(size)) for size in rng.integers(longest // 2, longest, 100)]
        files = RecordFiles(write_shards(tmp_path, [records]), sidecar=False)
        for numbers in (np.arange(100), np.arange(100)[::-1], rng.integers(0, 100, 300), [99], []):
            assert files.read(numbers) == [records[n] for n in numbers]


def test_numbers_that_there_are_not(tmp_path):
    files = RecordFiles(write_shards(tmp_path, SHARDS))
    for wrong in ([-1], [0, 7], np.array([2**63], np.uint64), [2**70]):
        with pytest.raises(IndexError, match=r"there is no record -?\d+: 4 files hold 7 records"):
            files.read(wrong)
    for wrong in ([0.5], [[1]], 3, [True], ["a"]):
        with pytest.raises(TypeError, match="must be integers in one dimension"):
            files.read(wrong)
    with pytest.raises(IndexError):
        files.where(7)


def test_the_place_of_a_record(tmp_path):
    pattern = write_shards(tmp_path, SHARDS)
    files = RecordFiles(pattern)
    assert files.paths == sorted(tmp_path.glob("train-*.tfrecord"))
    places = [
        f"train-{shard:05d}.tfrecord: record {n}"
        for shard in range(4)
        for n in range(len(SHARDS[shard]))
    ]
    assert [files.where(n).removeprefix(f"{tmp_path}/") for n in range(len(files))] == places


def test_no_records_at_all(tmp_path):
    files = RecordFiles(write_shards(tmp_path, [[], []]))
    assert len(files) == 0
    assert files.read([]) == []
    with pytest.raises(IndexError, match="2 files hold 0 records"):
        files.read([0])


@pytest.mark.parametrize("place", range(frame_record(b"two").__len__()))
def test_every_byte_that_changes_after_indexing_is_seen(tmp_path, place):
    pattern = write_shards(tmp_path, SHARDS)
    files = RecordFiles(pattern)
    start = sum(len(frame_record(record)) for record in SHARDS[0][:2])
    flip(tmp_path / "train-00000.tfrecord", start + place)
    what = "length" if place < 12 else "data"
    with pytest.raises(
        DamagedRecordError, match=f"record 2 at byte {start} is damaged: the checksum of its {what}"
    ):
        files.read([6, 2])
    unaffected = [0, 1, 3, 4, 5, 6]
    assert files.read(unaffected) == [RECORDS[n] for n in unaffected]
    if place >= 12:
        assert len(RecordFiles(pattern, verify=False, sidecar=False).read([2])) == 1


def test_damaged_records_are_left_out_if_asked(tmp_path):
    pattern = write_shards(tmp_path, SHARDS)
    flip(tmp_path / "train-00000.tfrecord", 16)
    flip(tmp_path / "train-00003.tfrecord", 12)
    for _ in range(2):
        files = RecordFiles(pattern, on_damage="skip")
        wanted = [RECORDS[n] for n in (0, 2, 3, 5, 6)]
        assert files.read(range(len(files))) == wanted
        assert [(damage.path.name, damage.number) for damage in files.damages] == [
            ("train-00000.tfrecord", 1),
            ("train-00003.tfrecord", 0),
        ]
        assert files.where(1) == f"{tmp_path}/train-00000.tfrecord: record 2"
        assert files.where(4) == f"{tmp_path}/train-00003.tfrecord: record 2"
    with pytest.raises(DamagedRecordError, match=r"00000.tfrecord: record 1 at byte 16"):
        RecordFiles(pattern)


def test_a_file_that_changed_its_size_is_not_touched(tmp_path):
    files = RecordFiles(write_shards(tmp_path, SHARDS))
    files.read([0, 6])
    os.truncate(tmp_path / "train-00003.tfrecord", 0)
    with pytest.raises(
        ValueError, match=r"00003.tfrecord: was changed while in use: it has 0 bytes and had \d+"
    ):
        files.read([6])
    assert files.read([0]) == [b""]
    (tmp_path / "train-00003.tfrecord").unlink()
    with pytest.raises(FileNotFoundError):
        files.read([6])


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_compressed_files_are_unpacked_once(tmp_path, pack):
    pattern = write_shards(tmp_path, SHARDS, pack)
    with pytest.raises(ValueError, match="random access needs a plain file"):
        RecordFiles(pattern)
    cache = tmp_path / "deep" / "cache"
    files = RecordFiles(pattern, cache=cache)
    assert files.read(range(len(files))) == RECORDS
    assert files.where(1) == f"{tmp_path}/train-00000.tfrecord: record 1"
    copies = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert (
        sum(
            path.name.startswith("train-00000.tfrecord-") and path.suffix == ".tfrecord"
            for path in copies
        )
        == 1
    )
    assert not [path for path in copies if path.suffix == ".writing"]
    assert RecordFiles(pattern, cache=cache).read([6]) == [b"six"]
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == copies
    write_shards(tmp_path, [[b"new"], [], [], []], pack)
    assert RecordFiles(pattern, cache=cache).read([0]) == [b"new"]


def test_plain_files_need_no_cache_and_an_asked_compression_is_checked(tmp_path):
    pattern = write_shards(tmp_path, SHARDS)
    assert RecordFiles(pattern, cache=tmp_path / "cache").read([1]) == [b"one"]
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="looks like a plain record file"):
        RecordFiles(pattern, cache=tmp_path / "cache", compression="GZIP")
    packed = write_shards(tmp_path, SHARDS, gzip.compress)
    with pytest.raises(ValueError, match="looks like GZIP"):
        RecordFiles(packed, compression=None)


@pytest.mark.parametrize("lost", [1, 8, 20])
def test_a_compressed_file_that_is_damaged(tmp_path, lost):
    path = tmp_path / "train.gz"
    path.write_bytes(gzip.compress(b"".join(map(frame_record, RECORDS)))[:-lost])
    with pytest.raises(
        DamagedRecordError, match=r"train.gz: record \d at byte .* GZIP stream is cut short"
    ):
        RecordFiles(path, cache=tmp_path / "cache")
    assert not [item for item in (tmp_path / "cache").iterdir() if item.suffix == ".writing"]
    kept = list(read_records(path, on_damage="skip", damages=[]))
    for _ in range(2):
        files = RecordFiles(path, cache=tmp_path / "cache", on_damage="skip")
        assert files.read(range(len(files))) == kept
        assert [(damage.path, damage.number) for damage in files.damages] == [(path, len(kept))]
    with pytest.raises(DamagedRecordError, match=r"train.gz: record \d .*in the uncompressed data"):
        RecordFiles(path, cache=tmp_path / "cache")


def test_damage_in_the_copy_is_told_of_the_file(tmp_path):
    pattern = write_shards(tmp_path, SHARDS, gzip.compress)
    files = RecordFiles(pattern, cache=tmp_path / "cache")
    (copy,) = (tmp_path / "cache").glob("train-00000*.tfrecord")
    flip(copy, 16 + 12)
    with pytest.raises(
        DamagedRecordError, match=r"/train-00000.tfrecord: record 1 at byte 16 .*uncompressed data"
    ):
        files.read([1])


def test_several_threads_with_more_files_than_maps(tmp_path, monkeypatch, rng):
    monkeypatch.setattr(record_files, "MAX_OPEN", 3)
    shards = [[rng.bytes(50 + n) for n in range(20)] for _ in range(10)]
    records = [record for shard in shards for record in shard]
    files = RecordFiles(write_shards(tmp_path, shards))
    batches = [rng.integers(0, len(records), 40) for _ in range(200)]
    with ThreadPoolExecutor(8) as pool:
        for batch, found in zip(batches, pool.map(files.read, batches), strict=True):
            assert found == [records[n] for n in batch]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from ftrain.formats.records.files import RecordFiles
files = RecordFiles(sys.argv[1], sidecar=False)
assert len(files) == 400
for _ in range(2):
    assert files.read(range(400)) == [b"%d" % n for n in range(400)]
"""


def test_more_files_than_may_be_open(tmp_path):
    pattern = write_shards(tmp_path, [[b"%d" % n] for n in range(400)])
    subprocess.run([sys.executable, "-c", LIMITED, pattern], check=True)


def read_and_fail(files, number):
    return files.read([number])


def test_files_and_errors_go_to_other_processes(tmp_path):
    files = RecordFiles(write_shards(tmp_path, SHARDS))
    files.read([0])
    flip(tmp_path / "train-00003.tfrecord", 12)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(read_and_fail, files, 1).result() == [b"one"]
        with pytest.raises(
            DamagedRecordError, match=r"00003.tfrecord: record 0 at byte 0 is damaged"
        ) as error:
            pool.submit(read_and_fail, files, 4).result()
    assert (error.value.number, error.value.offset, error.value.uncompressed) == (0, 0, False)


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    write(tmp_path / "records", [b"here"])
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "records", [b"else"])
    monkeypatch.chdir(tmp_path)
    files = RecordFiles("records")
    monkeypatch.chdir("other")
    assert files.read([0]) == [b"here"]
    assert files.where(0) == "records: record 0"


def test_a_file_that_was_replaced_by_one_of_its_size_is_noticed(tmp_path):
    path = write(tmp_path / "records", [b"old"])
    files = RecordFiles(path)
    assert files.read([0]) == [b"old"]
    write(tmp_path / "new", [b"new"]).replace(path)
    os.utime(path, (1, 1))
    with pytest.raises(ValueError, match="was changed while in use"):
        files.read([0])


def test_what_is_no_regular_file_has_no_index(tmp_path):
    with pytest.raises(ValueError, match="is not a regular file"):
        RecordFiles("/dev/null")
    path = write(tmp_path / "records", [b"a"])
    (tmp_path / "records.index").write_text("somebody else's")
    assert RecordFiles(path).read([0]) == [b"a"]
    assert (tmp_path / "records.index").read_text() == "somebody else's"
