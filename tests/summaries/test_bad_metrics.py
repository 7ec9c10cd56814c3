"""Unreadable lines of metrics.jsonl: a run resumes, good lines keep their bytes, none is lost."""

import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ftrain.summaries import MetricsFile, read_metrics

ROOT = Path(__file__).parents[2]
GOOD = [
    b'{"step": 1,   "loss": 0.50}\n',
    b'{"loss": 1e-1, "step": 2}\r\n',
    '{"step": 3, "text": "é"}\n'.encode(),
]
BAD = {
    "no UTF-8": b'{"step": 1, "text": "\xff\xfe"}',
    "a step of text": b'{"step": "x"}',
    "a step of floats": b'{"step": 1.5}',
    "a step that is true": b'{"step": true}',
    "no step": b'{"loss": 0.5}',
    "deep nesting": b'{"step": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 5,000 digits": b'{"step": 1, "x": ' + b"1" * 5000 + b"}",
    "a step of 4,000 digits": b'{"step": ' + b"1" * 4000 + b"}",
    "NaN": b'{"step": 1, "x": NaN}',
    "a list": b"[1, 2]",
    "cut": b'{"step": 1, "lo',
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_bad_line_is_moved_aside_and_the_good_ones_keep_their_bytes(tmp_path, bad, place):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join([*GOOD[:place], bad + b"\n", *GOOD[place:]]))
    with pytest.warns(UserWarning, match=rf"line {place + 1} cannot be read"):
        assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    with pytest.warns(
        UserWarning, match=rf"metrics\.jsonl: line {place + 1} cannot be .*moved to"
    ) as warned:
        MetricsFile(path, start_step=2).close()
    assert len(warned) == 1
    assert path.read_bytes() == b"".join(GOOD[:2])
    assert path.with_name("metrics.jsonl.bad").read_bytes() == bad + b"\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "metrics.jsonl.bad",
    ]


def test_one_warning_counts_many_bad_lines_and_earlier_ones_stay_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for lines in (2, 3):
        path.write_bytes(GOOD[0] + b"bad\n" * lines + b"\n" + GOOD[1])
        with pytest.warns(
            UserWarning, match=rf"{lines} lines, the first is line 2, cannot"
        ) as warned:
            MetricsFile(path, start_step=9).close()
        assert len(warned) == 1
        assert path.read_bytes() == b"".join(GOOD[:2])
    assert path.with_name("metrics.jsonl.bad").read_bytes() == b"bad\n" * 5


def test_a_last_line_that_is_cut_is_kept_aside_and_a_whole_one_gets_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD[0] + b'{"step": 2}')
    MetricsFile(path, start_step=9).close()
    assert path.read_bytes() == GOOD[0] + b'{"step": 2}\n'
    path.write_bytes(GOOD[0] + b'{"ste')
    assert [line["step"] for line in read_metrics(path)] == [1]  # it may still be being written
    with pytest.warns(UserWarning, match="line 2 cannot be read"):
        MetricsFile(path, start_step=9).close()
    assert path.with_name("metrics.jsonl.bad").read_bytes() == b'{"ste\n'


def test_a_file_without_anything_to_drop_is_not_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(GOOD))
    before = os.stat(path)
    MetricsFile(path, start_step=3).close()
    after = os.stat(path)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_link_stays_a_link(tmp_path):
    path = tmp_path / "metrics.jsonl"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"".join(GOOD))
    path.symlink_to(elsewhere)
    MetricsFile(path, start_step=1).close()
    assert path.is_symlink()
    assert elsewhere.read_bytes() == GOOD[0]


def test_a_limit_that_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_line_bytes must be >= 1, got 0"):
        MetricsFile(tmp_path / "metrics.jsonl", max_line_bytes=0)


PROGRAM = """
    import resource, sys, warnings
    from ftrain.summaries import MetricsFile, read_metrics
    warnings.simplefilter("ignore")
    before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (before + (48 << 20), -1))
    options = {"max_line_bytes": 1 << 20}
    assert [line["step"] for line in read_metrics(sys.argv[1], **options)] == [1, 2]
    MetricsFile(sys.argv[1], start_step=2, **options).close()
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="no limit on memory")
def test_a_line_of_100_mb_takes_no_more_memory_than_the_limit(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.write(GOOD[0] + b'{"step": 1, "text": "')
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n' + GOOD[1])
    subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM), path], check=True, cwd=ROOT)
    assert path.read_bytes() == b"".join(GOOD[:2])
    assert path.with_name("metrics.jsonl.bad").stat().st_size == (100 << 20) + len(
        b'{"step": 1, "text": ""}\n'
    )
