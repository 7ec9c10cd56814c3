"""Record files that the reference implementation wrote or refused."""

from base64 import b64decode

import pytest
from references import cases

from ftrain.formats.records.encoding import DamagedRecordError
from ftrain.formats.records.files import RecordFiles
from ftrain.formats.records.reading import read_records
from ftrain.formats.records.writing import RecordWriter

pytestmark = pytest.mark.reference
CASES = cases("tfrecords")
READABLE = [case for case in CASES if "error" not in case]


def name(case):
    return f"{case['compression'] or 'plain'}-{case.get('note', 'records')}".replace(" ", "-")


def records_of(case):
    return [b64decode(record) for record in case.get("records", case.get("value", []))]


@pytest.fixture
def path(tmp_path, case):
    (tmp_path / "records").write_bytes(b64decode(case["file"]))
    return tmp_path / "records"


@pytest.mark.parametrize("case", READABLE, ids=name)
def test_reading(case, path, tmp_path):
    wanted = records_of(case)
    assert (
        list(read_records(path))
        == list(read_records(path, compression=case["compression"]))
        == wanted
    )
    files = RecordFiles(path, cache=tmp_path / "cache")
    assert files.read(range(len(files))) == wanted


@pytest.mark.parametrize("case", READABLE, ids=name)
def test_writing(case, tmp_path):
    with RecordWriter(tmp_path / "ours", compression=case["compression"]) as writer:
        for record in records_of(case):
            writer.write(record)
    if case["compression"] is None:
        assert (tmp_path / "ours").read_bytes() == b64decode(case["file"])
    assert list(read_records(tmp_path / "ours", compression=case["compression"])) == records_of(
        case
    )


@pytest.mark.parametrize("case", [case for case in CASES if "error" in case], ids=name)
def test_what_is_refused(case, path):
    assert case["error"] == "DataLossError"
    with pytest.raises(DamagedRecordError):
        list(read_records(path, compression=case["compression"]))
