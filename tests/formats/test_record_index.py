import json
import os
import struct

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.formats.records import index as record_index
from ftrain.formats.records.encoding import DamagedRecordError, frame_record
from ftrain.formats.records.index import index_records
from ftrain.formats.records.reading import read_records

RECORDS = [b"", b"one", b"second", b"x" * 300, b"4"]


def write(path, records):
    path.write_bytes(b"".join(map(frame_record, records)))
    return path


def check(index, path, records):
    content = path.read_bytes()
    assert index.offsets.dtype == index.lengths.dtype == np.int64
    found = [
        content[at + 12 : at + 12 + size]
        for at, size in zip(index.offsets, index.lengths, strict=True)
    ]
    assert found == records
    assert (index.path, index.size, index.mtime_ns) == (
        path,
        len(content),
        os.stat(path).st_mtime_ns,
    )


@pytest.fixture
def walks(monkeypatch):
    """Record the files that are indexed again."""
    seen = []

    def walk(path, on_damage, limit):
        seen.append((path.name, on_damage))
        return original(path, on_damage, limit)

    original = record_index.walk_frames
    monkeypatch.setattr(record_index, "walk_frames", walk)
    return seen


@given(st.lists(st.tuples(st.binary(max_size=20), st.sampled_from([1, 2, 20, 200])), max_size=8))
def test_every_record_is_found_in_runs_and_alone(tmp_path_factory, runs):
    records = [record for record, count in runs for _ in range(count)]
    path = write(tmp_path_factory.mktemp("index") / "records", records)
    for on_damage in ("raise", "skip"):
        for sidecar in (False, True, True):
            check(index_records(path, on_damage=on_damage, sidecar=sidecar), path, records)


def test_runs_longer_than_one_guess(tmp_path, monkeypatch):
    monkeypatch.setattr("ftrain.formats.records.index._LARGEST_GUESS", 256)
    records = [b"abc"] * 3000 + [b"abcd"] * 5 + [b"abc"] * 100
    check(index_records(write(tmp_path / "records", records)), tmp_path / "records", records)


def test_damage_is_told_as_by_reading(tmp_path):
    whole = b"".join(map(frame_record, RECORDS * 8))
    path = tmp_path / "records"
    for place in range(0, len(whole), 7):
        for content in (
            whole[:place],
            whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :],
        ):
            path.write_bytes(content)
            damages = []
            records = list(read_records(path, on_damage="skip", damages=damages))
            index = index_records(path, on_damage="skip", sidecar=False)
            check(index, path, records)
            assert [str(damage) for damage in index.damages] == [str(damage) for damage in damages]
            if damages and "checksum of its data" not in damages[0].reason:
                with pytest.raises(DamagedRecordError) as error:
                    index_records(path, sidecar=False)
                assert str(error.value) == str(damages[0])


def test_a_run_that_ends_in_damage(tmp_path):
    content = b"".join(map(frame_record, [b"12345678"] * 1000))
    (tmp_path / "cut").write_bytes(content[:-1])
    with pytest.raises(
        DamagedRecordError, match="record 999 at byte 23976 is damaged: its data are cut short"
    ):
        index_records(tmp_path / "cut")
    (tmp_path / "flipped").write_bytes(content[: 24 * 500] + b"?" + content[24 * 500 + 1 :])
    with pytest.raises(
        DamagedRecordError, match="record 500 at byte 12000 is damaged: the checksum of its length"
    ):
        index_records(tmp_path / "flipped")
    assert not (tmp_path / "cut.index").exists()


def test_a_length_that_no_file_has(tmp_path):
    length = struct.pack("<Q", 2**63 + 5)
    crc = frame_record(length)[-4:]
    (tmp_path / "records").write_bytes(length + crc + bytes(100))
    with pytest.raises(
        DamagedRecordError, match="record 0 at byte 0 is damaged: its data are cut short"
    ):
        index_records(tmp_path / "records")


def test_an_empty_file_has_an_empty_index(tmp_path):
    path = write(tmp_path / "records", [])
    for _ in range(2):
        assert len(index_records(path)) == 0


def test_what_cannot_be_indexed(tmp_path):
    import gzip

    (tmp_path / "train.tfrecord.gz").write_bytes(gzip.compress(frame_record(b"one")))
    with pytest.raises(
        ValueError, match=r"GZIP.*ftrain data convert .*train.tfrecord.gz .*train.tfrecord`.*cache="
    ):
        index_records(tmp_path / "train.tfrecord.gz")
    with pytest.raises(FileNotFoundError):
        index_records(tmp_path / "none")
    with pytest.raises(ValueError, match=r"on_damage must be .*, got 'warn'"):
        index_records(tmp_path / "none", on_damage="warn")


def test_a_sidecar_is_written_once_and_used(tmp_path, walks):
    path = write(tmp_path / "records", RECORDS)
    for _ in range(3):
        check(index_records(path), path, RECORDS)
    assert walks == [("records", "raise")]
    assert sorted(os.listdir(tmp_path)) == ["records", "records.index"]
    index_records(path, sidecar=False)
    assert len(walks) == 2


def test_a_sidecar_serves_the_other_mode_only_if_it_can(tmp_path, walks):
    path = write(tmp_path / "records", RECORDS)
    index_records(path)
    index_records(path, on_damage="skip")  # no data was verified before
    index_records(path)
    index_records(path, on_damage="skip")
    assert walks == [("records", "raise"), ("records", "skip")]
    content = bytearray(path.read_bytes())
    content[16 + 12] ^= 1
    path.write_bytes(bytes(content))
    damaged = index_records(path, on_damage="skip")
    again = index_records(path, on_damage="skip")
    assert [str(damage) for damage in again.damages] == [str(damage) for damage in damaged.damages]
    assert len(again.damages) == 1
    check(again, path, RECORDS[:1] + RECORDS[2:])
    assert walks[2:] == [("records", "skip")]
    assert len(index_records(path)) == len(RECORDS)
    assert walks[3:] == [("records", "raise")]


def grow(path):
    write(path, [*RECORDS, b"more"])


def touch(path):
    os.utime(path, ns=(0, 12345))


def change_head(path):
    status = os.stat(path)
    write(path, [*RECORDS[1:], RECORDS[0]])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def change_tail(path):
    status = os.stat(path)
    write(path, [RECORDS[1], RECORDS[0], *RECORDS[2:]])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [grow, touch, change_head, change_tail])
def test_the_sidecar_of_a_file_that_changed_is_built_again(tmp_path, walks, change):
    path = write(tmp_path / "records", RECORDS)
    index_records(path)
    change(path)
    check(index_records(path), path, list(read_records(path)))
    check(index_records(path), path, list(read_records(path)))
    assert len(walks) == 2


def test_any_damage_of_a_sidecar_has_it_built_again(tmp_path, walks):
    path = write(tmp_path / "records", RECORDS)
    index_records(path)
    sidecar = tmp_path / "records.index"
    good = sidecar.read_bytes()
    damaged = [
        good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :] for place in range(len(good))
    ]
    damaged += [good[:place] for place in range(len(good))] + [good + b"x", good * 2]
    for content in damaged:
        sidecar.write_bytes(content)
        check(index_records(path), path, RECORDS)
        # Without its first bytes the file cannot be recognized, so it stays.
        assert sidecar.read_bytes() == (good if content[:16] == good[:16] else content)
    assert len(walks) == 1 + len(damaged)


def forge(path, *, offsets, lengths, **changes):
    """A sidecar with right checksums and these contents."""
    sidecar = record_index.sidecar_path(path)
    content = sidecar.read_bytes()
    size = struct.unpack_from("<I", content, 16)[0]
    header = json.loads(content[20 : 20 + size]) | {"count": len(offsets)} | changes
    text = json.dumps(header).encode() if "text" not in changes else changes["text"]
    arrays = np.array(offsets, "<i8").tobytes() + np.array(lengths, "<i8").tobytes()
    content = (
        content[:16] + struct.pack("<I", changes.get("size_of_text", len(text))) + text + arrays
    )
    sidecar.write_bytes(content + struct.pack("<I", google_crc32c.value(content)))


HOSTILE = {
    "beyond the end": {"offsets": [0, 2**40], "lengths": [0, 5]},
    "overflow": {"offsets": [0, 16], "lengths": [0, 2**63 - 1]},
    "before the start": {"offsets": [-16, 0], "lengths": [0, 0]},
    "negative length": {"offsets": [0, 16], "lengths": [-5, 3]},
    "overlap": {
        "offsets": [0, 10],
        "lengths": [100, 100],
        "mode": "skip",
        "damages": [[0, 0, "x"]],
    },
    "backwards": {"offsets": [16, 0], "lengths": [3, 0], "mode": "skip", "damages": [[0, 0, "x"]]},
    "a gap": {"offsets": [0], "lengths": [0]},
    "nothing": {"offsets": [], "lengths": []},
    "wrong count": {"offsets": [0], "lengths": [0], "count": 2**62},
    "count of a wrong kind": {"offsets": [0], "lengths": [0], "count": "one"},
    "negative count": {"offsets": [0], "lengths": [0], "count": -1},
    "no list of damages": {"offsets": [0], "lengths": [0], "damages": 7},
    "a damage of a wrong kind": {"offsets": [0], "lengths": [0], "damages": [["a", "b", 3]]},
    "another mode": {"offsets": [0], "lengths": [0], "mode": []},
    "not JSON": {"offsets": [], "lengths": [], "text": b"{"},
    "not text": {"offsets": [], "lengths": [], "text": b"\xff\xfe\xfd"},
    "no object": {"offsets": [], "lengths": [], "text": b"[1]"},
    "no entries": {"offsets": [], "lengths": [], "text": b"{}"},
    "deep": {"offsets": [], "lengths": [], "text": b"[" * 100_000},
    "long header": {"offsets": [], "lengths": [], "size_of_text": 2**32 - 1},
}


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
@pytest.mark.parametrize("content", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_sidecar_is_built_again(tmp_path, walks, content, on_damage):
    path = write(tmp_path / "records", RECORDS)
    index_records(path, on_damage=on_damage)
    forge(path, **{"mode": on_damage} | content)
    check(index_records(path, on_damage=on_damage), path, RECORDS)
    assert len(walks) == 2


def test_a_forged_sidecar_that_is_right_is_used(tmp_path, walks):
    path = write(tmp_path / "records", [b"", b"one"])
    index_records(path)
    forge(path, offsets=[0, 16], lengths=[0, 3])
    check(index_records(path), path, [b"", b"one"])
    assert len(walks) == 1


def test_a_sidecar_of_absurd_size_or_kind_is_not_read(tmp_path, walks):
    path = write(tmp_path / "records", RECORDS)
    with open(tmp_path / "records.index", "wb") as file:
        file.truncate(2**40)
    check(index_records(path), path, RECORDS)
    (tmp_path / "records.index").unlink()
    os.mkfifo(tmp_path / "records.index")
    check(index_records(path), path, RECORDS)
    (tmp_path / "records.index").unlink()
    (tmp_path / "records.index").mkdir()
    check(index_records(path), path, RECORDS)
    assert sorted(os.listdir(tmp_path)) == ["records", "records.index"]
    assert len(walks) == 3


def test_a_directory_that_takes_no_files_is_no_error(tmp_path, monkeypatch):
    path = write(tmp_path / "records", RECORDS)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.write_bytes", refuse)
    check(index_records(path), path, RECORDS)
    assert os.listdir(tmp_path) == ["records"]


def test_no_sidecar_is_kept_of_a_file_that_grew_meanwhile(tmp_path, monkeypatch):
    path = write(tmp_path / "records", RECORDS)
    original = record_index.walk_frames

    def walk(*arguments):
        frames = original(*arguments)
        grow(path)
        return frames

    monkeypatch.setattr(record_index, "walk_frames", walk)
    index_records(path)
    assert os.listdir(tmp_path) == ["records"]
