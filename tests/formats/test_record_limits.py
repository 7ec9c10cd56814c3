"""Damaged and crafted record files: work linear in their bytes, and memory up to a given limit."""

import gzip
import random
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.data import RecordSource
from ftrain.formats import (
    DamagedRecordError,
    RecordFiles,
    RecordWriter,
    frame_record,
    index_records,
    read_records,
)
from ftrain.formats.records import reading
from ftrain.formats.records.encoding import mask_crc, masked_crc, shift_crc

ROOT = Path(__file__).parents[2]


class Work:
    """Counts the bytes in checksums, and the places that are searched for a header."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        self.places = 0
        for name in ("value", "extend"):
            monkeypatch.setattr(google_crc32c, name, self._counting(getattr(google_crc32c, name)))
        monkeypatch.setattr(reading, "np", self)

    def __getattr__(self, name):
        return getattr(np, name)

    def ndarray(self, count, *arguments):
        self.places += count
        return np.ndarray(count, *arguments)

    def _counting(self, function):
        def counted(*arguments):
            self.bytes += len(arguments[-1])
            return function(*arguments)

        return counted


def header(length: int) -> bytes:
    packed = struct.pack("<Q", length)
    return packed + struct.pack("<I", masked_crc(packed))


def damaged(record: bytes, place: int) -> bytes:
    return record[:place] + bytes([record[place] ^ 1]) + record[place + 1 :]


def nested_lengths(size: int) -> bytes:
    """Headers only, each of which claims all that follows."""
    return b"".join(header(max(size - at - 16, 0)) for at in range(0, size, 12))


def lengths_between_records(size: int) -> bytes:
    """Whole records of no bytes, and before each a header that claims all that follows."""
    return b"".join(header(max(size - at - 16, 0)) + frame_record(b"") for at in range(0, size, 28))


GOOD = frame_record(b"x" * 84)
CRAFTED = {
    "damaged headers": lambda size: (damaged(GOOD, 0) + GOOD) * (size // 200),
    "damaged data": lambda size: (damaged(GOOD, 50) + GOOD) * (size // 200),
    "headers only": nested_lengths,
    "headers between records": lengths_between_records,
}


@pytest.mark.parametrize("make", CRAFTED.values(), ids=CRAFTED.keys())
def test_the_work_is_in_proportion_to_the_bytes(tmp_path, monkeypatch, make):
    content = make(600_000)
    path = tmp_path / "records"
    path.write_bytes(content)
    work = Work(monkeypatch)
    for _ in read_records(path, on_damage="skip", damages=[]):
        pass
    # Sums are kept for every 4 KB. The rest, at both ends of a record, is at most as much again
    # for each header.
    headers = len(content) // 12
    assert work.bytes <= 4 * len(content) + headers * (1 << 14)
    assert work.places <= 3 * len(content)  # two arrays for each block


def test_damage_costs_what_lies_around_it_and_not_the_whole_window(tmp_path, monkeypatch):
    content = (damaged(GOOD, 0) + GOOD * 9) * 1000
    (tmp_path / "records").write_bytes(content)
    work = Work(monkeypatch)
    damages = []
    assert len(list(read_records(tmp_path / "records", on_damage="skip", damages=damages))) == 9000
    assert len(damages) == 1000
    assert work.places <= 3 * len(content)
    assert work.bytes <= 3 * len(content)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_the_checksum_of_a_part_comes_from_those_of_two_beginnings(first, second):
    first_crc = google_crc32c.value(first)
    both_crc = google_crc32c.value(first + second)
    assert both_crc ^ shift_crc(first_crc, len(second)) == google_crc32c.value(second)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_large_records_among_damage_are_found_and_verified(tmp_path, pack):
    random_bytes = random.Random(0)
    records = [
        random_bytes.randbytes(size) for size in (3_000_000, 20_000, 5_000_000, 16_385, 70_000)
    ]
    torn = frame_record(bytes(9_000_000))[:100]
    content = b"".join(
        torn + frame_record(record) + damaged(frame_record(record), 9000) for record in records
    )
    (tmp_path / "records").write_bytes(pack(content))
    damages = []
    assert list(read_records(tmp_path / "records", on_damage="skip", damages=damages)) == records
    assert len(damages) >= 2 * len(records) - 1


def test_a_record_above_the_limit_is_damage_that_names_the_limit(tmp_path):
    path = tmp_path / "records"
    with RecordWriter(path) as writer:
        for record in (b"one", bytes(2000), b"three"):
            writer.write(record)
    wanted = (
        "record 1 at byte 19 is damaged: "
        "it has 2000 bytes, more than max_record_bytes=1000; pass a larger"
    )
    with pytest.raises(DamagedRecordError, match=wanted):
        list(read_records(path, max_record_bytes=1000))
    damages = []
    found = list(read_records(path, max_record_bytes=1000, on_damage="skip", damages=damages))
    assert found == [b"one", b"three"]
    assert [damage.number for damage in damages] == [1]
    assert list(read_records(path, max_record_bytes=2000))[1] == bytes(2000)
    with pytest.raises(ValueError, match="max_record_bytes must be at least 1, got 0"):
        read_records(path, max_record_bytes=0)


def test_an_index_obeys_the_limit_also_when_it_was_kept_under_another(tmp_path):
    path = tmp_path / "records.tfrecord"
    with RecordWriter(path) as writer:
        for record in (b"one", bytes(2000), b"three"):
            writer.write(record)
    for _ in range(2):  # without and with a sidecar
        assert len(index_records(path)) == 3
        with pytest.raises(DamagedRecordError, match="more than max_record_bytes=1000"):
            index_records(path, max_record_bytes=1000)
    for limit, count in ((1000, 2), (5000, 3), (1000, 2)):
        assert len(RecordFiles(path, on_damage="skip", max_record_bytes=limit)) == count
    with pytest.raises(DamagedRecordError, match="more than max_record_bytes=1000"):
        RecordSource(path, max_record_bytes=1000)


PROGRAM = """
    import resource, sys
    from ftrain.formats import DamagedRecordError, read_records
    before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (before + (300 << 20), -1))
    limit = {"max_record_bytes": int(sys.argv[2])}
    try:
        print([len(record) for record in read_records(sys.argv[1], **limit)])
    except DamagedRecordError as error:
        print(error)
    damages = []
    records = read_records(sys.argv[1], on_damage="skip", damages=damages, **limit)
    print([len(record) for record in records], len(damages))
"""


@pytest.mark.parametrize(
    ("limit", "found"), [(1 << 26, "more than max_record_bytes"), (101 << 20, "[104857600]")]
)
def test_a_small_gzip_file_that_claims_much_takes_memory_up_to_the_limit(tmp_path, limit, found):
    path = tmp_path / "records.gz"
    size = 400 << 20 if limit == 1 << 26 else 100 << 20
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header(size))
        crc = google_crc32c.Checksum()
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
            crc.update(bytes(1 << 20))
        file.write(struct.pack("<I", mask_crc(int.from_bytes(crc.digest(), "big"))))
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), path, str(limit)]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert found in done.stdout
    assert done.stdout.splitlines()[-1] == ("[] 1" if limit == 1 << 26 else "[104857600] 0")
