import gzip
import itertools
import os
import random
import struct
import threading
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New, masked_crc32c

from ftrain.formats.records.encoding import (
    DamagedRecordError,
    frame_record,
    masked_crc,
    masked_length_crcs,
)
from ftrain.formats.records.reading import read_records

RECORDS = [b"", b"one", b"\x00" * 1000]
PACK = {None: bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}
HUGE = struct.pack("<Q", 2**60) + struct.pack("<I", masked_crc(struct.pack("<Q", 2**60)))


def frames(records):
    return b"".join(map(frame_record, records))


def write(path, records, compression=None):
    path.write_bytes(PACK[compression](frames(records)))
    return path


def read_skipping(path, **options):
    """Return the records that are left, and the damages."""
    damages = []
    return list(read_records(path, on_damage="skip", damages=damages, **options)), damages


def test_what_was_appended_behind_a_torn_record_is_found(tmp_path):
    torn = frame_record(bytes(100_000))[:500]  # a writer died, and another appended
    later = [b"record %d" % number for number in range(100)]
    path = tmp_path / "records"
    path.write_bytes(frame_record(b"first") + torn + frames(later))
    records, damages = read_skipping(path)
    assert records == [b"first", *later]
    assert [damage.number for damage in damages] == [1]


def test_the_checksums_of_many_lengths_are_those_of_each():
    lengths = np.array([0, 1, 255, 256, 330, 2**32, 2**40 + 7, 2**63, 2**64 - 1], np.uint64)
    wanted = [masked_crc(struct.pack("<Q", int(length))) for length in lengths]
    assert masked_length_crcs(lengths).tolist() == wanted
    assert masked_length_crcs(lengths[:0]).tolist() == []


@given(st.binary(max_size=300))
def test_the_frame_is_the_one_that_tensorboard_computes(data):
    length = struct.pack("<Q", len(data))
    theirs = [
        length,
        struct.pack("<I", masked_crc32c(length)),
        data,
        struct.pack("<I", masked_crc32c(data)),
    ]
    assert frame_record(data) == b"".join(theirs)


def test_what_is_written_is_read_back_by_us_and_by_tensorboard(tmp_path):
    path = write(tmp_path / "records", RECORDS)
    assert list(read_records(path)) == RECORDS
    reader = PyRecordReader_New(str(path))
    theirs = []
    for _ in RECORDS:
        reader.GetNext()
        theirs.append(reader.record())
    assert theirs == RECORDS


@given(st.lists(st.binary(max_size=50)), st.sampled_from(list(PACK)), st.booleans())
def test_every_compression_is_detected(tmp_path_factory, records, compression, verify):
    path = write(tmp_path_factory.mktemp("records") / "records", records, compression)
    assert list(read_records(path, verify=verify)) == records
    assert (
        list(read_records(path, compression=compression, on_damage="skip", verify=verify))
        == records
    )


def test_records_longer_than_what_is_read_at_once(tmp_path):
    records = [os.urandom(3_000_000), b"x", os.urandom(2_000_000)]
    for compression in PACK:
        assert list(read_records(write(tmp_path / "records", records, compression))) == records


def test_more_lengths_than_are_remembered(tmp_path):
    records = [bytes(n) for n in range(5000)]
    assert list(read_records(write(tmp_path / "records", records))) == records


@given(st.data())
def test_any_flipped_byte_and_any_cut_is_reported_with_its_place(tmp_path_factory, data):
    whole = frames(RECORDS)
    place = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path_factory.mktemp("damage") / "records"
    flipped = bytearray(whole)
    flipped[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(flipped))
    with pytest.raises(DamagedRecordError, match=r"records: record \d at byte \d+ is damaged"):
        list(read_records(path))
    boundaries = {0, 16, 35}
    path.write_bytes(whole[:place])
    if place in boundaries:
        assert list(read_records(path)) == RECORDS[: sorted(boundaries).index(place)]
    else:
        with pytest.raises(DamagedRecordError, match="cut short"):
            list(read_records(path))


SMALL = [b"", b"first", b"second record", b"third", b"4th", b""]
STARTS = [0, *itertools.accumulate(len(record) + 16 for record in SMALL)]


def record_at(place):
    return max(n for n, start in enumerate(STARTS) if start <= place)


def test_every_flipped_byte_of_a_plain_file_costs_one_record(tmp_path):
    whole = frames(SMALL)
    path = tmp_path / "records"
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        hit = record_at(place)
        found, damages = read_skipping(path)
        assert found == SMALL[:hit] + SMALL[hit + 1 :]
        assert [(damage.path, damage.number, damage.offset) for damage in damages] == [
            (path, hit, STARTS[hit])
        ]
        with pytest.raises(DamagedRecordError) as error:
            list(read_records(path))
        assert str(error.value) == str(damages[0])


def test_every_cut_of_a_plain_file_leaves_what_is_before_it(tmp_path):
    path = tmp_path / "records"
    for place in range(len(frames(SMALL))):
        path.write_bytes(frames(SMALL)[:place])
        found, damages = read_skipping(path)
        assert found == SMALL[: record_at(place)]
        assert [damage.offset for damage in damages] == (
            [] if place in STARTS else [STARTS[record_at(place)]]
        )
        assert all("cut short" in damage.reason for damage in damages)


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_every_cut_of_a_compressed_file_is_reported_once(tmp_path, compression):
    path = tmp_path / "records"
    whole = PACK[compression](frames(SMALL))
    for place in range(1, len(whole)):
        path.write_bytes(whole[:place])
        found, damages = read_skipping(path, compression=compression)
        assert found == SMALL[: len(found)]
        assert len(damages) == 1
        assert "cut short" in str(damages[0])
        assert damages[0].number == len(found)
        with pytest.raises(DamagedRecordError, match=r"cut short.*in the uncompressed data"):
            list(read_records(path, compression=compression))


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_no_flipped_byte_of_a_compressed_file_makes_a_record_that_was_not_written(
    tmp_path, compression
):
    path = tmp_path / "records"
    whole = PACK[compression](frames(SMALL))
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        found, damages = read_skipping(path)
        assert set(found) <= set(SMALL)
        # The time, the system and such in the header of a GZIP file are not covered by a checksum.
        assert damages or (found == SMALL and compression == "GZIP" and place < 10)


def test_what_comes_before_the_damage_of_a_compressed_stream_is_read(tmp_path):
    records = [os.urandom(1000) for _ in range(2000)]
    path = write(tmp_path / "records", records, "GZIP")
    content = bytearray(path.read_bytes())
    content[-6] ^= 1  # in the checksum of the entire stream
    path.write_bytes(bytes(content))
    found, damages = read_skipping(path)
    assert found == records
    assert [(damage.number, damage.offset) for damage in damages] == [(2000, 2000 * 1016)]
    assert "GZIP stream is damaged" in damages[0].reason


def test_damage_within_a_compressed_stream_is_stepped_over(tmp_path):
    plain = bytearray(frames(SMALL))
    plain[STARTS[2]] ^= 1
    for compression in ("GZIP", "ZLIB"):
        (tmp_path / "records").write_bytes(PACK[compression](bytes(plain)))
        found, damages = read_skipping(tmp_path / "records")
        assert found == SMALL[:2] + SMALL[3:]
        assert [damage.offset for damage in damages] == [STARTS[2]]


def test_joined_gzip_files_are_one_and_may_be_padded(tmp_path):
    path = tmp_path / "records"
    path.write_bytes(
        gzip.compress(frames(SMALL))
        + gzip.compress(b"")
        + gzip.compress(frames(RECORDS))
        + bytes(70_000)
    )
    assert list(read_records(path)) == SMALL + RECORDS


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_what_follows_a_compressed_stream_is_damage(tmp_path, compression):
    path = tmp_path / "records"
    path.write_bytes(PACK[compression](frames(SMALL)) + b"something else")
    found, damages = read_skipping(path)
    assert found == SMALL
    assert len(damages) == 1
    path.write_bytes(PACK[compression](b"") + zlib.compress(frames(SMALL)))
    assert read_skipping(path)[0] == []


def test_damage_without_a_list_for_it_is_a_warning_at_the_end(tmp_path):
    path = write(tmp_path / "records", SMALL)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(
        UserWarning, match=r"1 damaged .*record 5 at byte \d+ is damaged: its data are cut short"
    ):
        assert list(read_records(path, on_damage="skip")) == SMALL[:-1]


def test_a_region_of_damage_counts_as_one(tmp_path):
    records = [os.urandom(100) for _ in range(100)]
    content = bytearray(frames(records))
    content[10 * 116 + 50 : 20 * 116 + 50] = bytes(10 * 116)
    (tmp_path / "records").write_bytes(bytes(content))
    found, damages = read_skipping(tmp_path / "records")
    assert found == records[:10] + records[21:]
    assert [(damage.number, damage.offset) for damage in damages] == [(10, 1160)]


def test_bytes_put_between_records_are_stepped_over(tmp_path):
    filler = random.Random(0).randbytes(3_000_000)
    before = [b"a" * 30, b"b" * 40]
    after = [os.urandom(2_500_000), b"c"]
    for garbage in (
        filler,
        bytes(3_000_000),
        b"\x01\x00" * 1_500_000,
        filler[: (1 << 20) - 5],
        b"?",
    ):
        (tmp_path / "records").write_bytes(frames(before) + garbage + frames(after) + garbage)
        found, damages = read_skipping(tmp_path / "records")
        assert found == before + after
        assert [damage.number for damage in damages] == [2, 5]


def test_a_header_may_lie_across_what_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("ftrain.formats.records.reading.CHUNK", 64)
    garbage = random.Random(2).randbytes(200)
    for size in range(1, 200):
        for compression in PACK:
            content = frame_record(b"one") + garbage[:size] + frames([b"two", b"three" * 30])
            (tmp_path / "records").write_bytes(PACK[compression](content))
            assert read_skipping(tmp_path / "records")[0] == [b"one", b"two", b"three" * 30]


@given(st.binary(max_size=200))
def test_garbage_is_damage_and_never_a_record(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("garbage") / "records"
    path.write_bytes(data)
    found, damages = read_skipping(path)
    assert found == []
    assert len(damages) == bool(data)


@pytest.mark.parametrize("compression", list(PACK))
def test_a_length_that_no_memory_holds_is_not_believed(tmp_path, compression):
    path = tmp_path / "records"
    path.write_bytes(PACK[compression](frame_record(b"one") + HUGE + bytes(40_000_000)))
    tracemalloc.start()
    try:
        assert read_skipping(path)[0] == [b"one"]
        with pytest.raises(
            DamagedRecordError, match="record 1 at byte 19 is damaged: its data are cut short"
        ):
            list(read_records(path))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_large_file_of_garbage_takes_little_memory(tmp_path):
    path = tmp_path / "records"
    path.write_bytes(
        frame_record(b"one") + random.Random(1).randbytes(20_000_000) + frame_record(b"two")
    )
    tracemalloc.start()
    try:
        assert read_skipping(path)[0] == [b"one", b"two"]
        assert tracemalloc.get_traced_memory()[1] < 14_000_000
    finally:
        tracemalloc.stop()


def test_without_verify_data_may_be_wrong_but_lengths_may_not(tmp_path):
    path = tmp_path / "records"
    content = bytearray(frames([b"one", b"two"]))
    content[12] ^= 1
    path.write_bytes(bytes(content))
    assert list(read_records(path, verify=False)) == [b"nne", b"two"]
    content[0] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DamagedRecordError, match="checksum of its length"):
        list(read_records(path, verify=False))


def test_a_plain_file_may_begin_like_a_compressed_one(tmp_path):
    # These lengths are, in bytes, the magic of GZIP with its method and a header of ZLIB.
    for length in (0x088B1F, 0x0178):
        records = [b"x" * length, b"y"]
        path = write(tmp_path / "records", records)
        assert list(read_records(path)) == list(read_records(path, compression=None)) == records
        content = bytearray(path.read_bytes())
        content[11] ^= 1
        path.write_bytes(bytes(content))
    assert read_skipping(path)[0] == [b"y"]


@pytest.mark.parametrize(("actual", "asked"), list(itertools.permutations(PACK, 2)))
def test_a_wrong_compression_is_an_error_with_the_right_one(tmp_path, actual, asked):
    path = write(tmp_path / "records", SMALL, actual)
    right = "None" if actual is None else f'"{actual}"'
    reader = read_records(path, compression=asked, on_damage="skip")
    with pytest.raises(
        ValueError, match=rf"records: looks like .*, expected .*; pass compression={right}"
    ):
        list(reader)


def test_a_file_of_no_bytes_has_no_records(tmp_path):
    (tmp_path / "records").write_bytes(b"")
    for compression in ("auto", None, "GZIP", "ZLIB"):
        assert list(read_records(tmp_path / "records", compression=compression)) == []


def test_a_pipe_can_be_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(frames(RECORDS * 100) + HUGE))
    writer.start()
    found, damages = read_skipping(pipe)
    writer.join()
    assert found == RECORDS * 100
    assert len(damages) == 1


def test_what_cannot_be_opened_is_an_ordinary_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_records(tmp_path / "none"))
    with pytest.raises(IsADirectoryError):
        list(read_records(tmp_path))


def test_unknown_options_are_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"compression must be .*, got 'gz'"):
        read_records(tmp_path, compression="gz")
    with pytest.raises(ValueError, match=r"on_damage must be .*, got 'ignore'"):
        read_records(tmp_path, on_damage="ignore")


def test_a_record_that_was_cut_does_not_take_others_with_it(tmp_path):
    torn = frame_record(bytes(1000))[:200]  # its length claims a part of what was appended
    later = [b"record %03d" % number for number in range(100)]
    path = tmp_path / "records"
    path.write_bytes(torn + frames(later))
    records, damages = read_skipping(path)
    assert records == later
    assert len(damages) == 1
