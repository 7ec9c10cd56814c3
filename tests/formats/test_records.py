import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New, masked_crc32c

from ftrain.formats import DamagedRecordError, frame_record, read_records

RECORDS = [b"", b"one", b"\x00" * 1000]


def write(path, records):
    path.write_bytes(b"".join(map(frame_record, records)))
    return path


@given(st.binary(max_size=300))
def test_the_frame_is_the_one_that_tensorboard_computes(data):
    length = struct.pack("<Q", len(data))
    theirs = [length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))]
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


@given(st.data())
def test_any_flipped_byte_and_any_cut_is_reported_with_its_place(tmp_path_factory, data):
    whole = b"".join(map(frame_record, RECORDS))
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
