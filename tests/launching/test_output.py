"""Lines of several processes on one screen."""

import os
import signal
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launched import wait_until
from processes import default_signals
from rich.console import Console

from ftrain.launching.child_environment import free_addresses
from ftrain.launching.output import LineSplitter, OutputReader, Screen
from ftrain.launching.signals import StopRequests, open_mailbox

pytestmark = pytest.mark.usefixtures("no_thread_left")


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"\n", b"a\nb"])), st.integers(1, 12))
def test_lines_are_cut_without_loss(pieces, limit):
    cutter = LineSplitter(limit)
    lines = [line for piece in pieces for line in cutter.feed(piece)] + cutter.end()
    whole = b"".join(pieces)
    assert b"".join(lines) == whole.replace(b"\n", b"")
    assert all(len(line) <= limit for line in lines)
    if all(len(line) <= limit for line in whole.split(b"\n")):
        assert lines == whole.removesuffix(b"\n").split(b"\n")[: len(lines)]
        assert len(lines) == whole.count(b"\n") + (not whole.endswith(b"\n") and whole != b"")


def test_a_line_without_end_is_not_kept():
    cutter = LineSplitter(10)
    assert cutter.feed(b"x" * 25) == [b"x" * 10, b"x" * 10]
    assert cutter.feed(b"\n") == [b"x" * 5]
    assert cutter.feed(b"y" * 10) == []
    assert cutter.feed(b"\n") == [b"y" * 10]


@pytest.fixture
def sink(tmp_path):
    """Two files to write to, and a function that reads them."""
    paths = [tmp_path / "out", tmp_path / "err"]
    descriptors = [os.open(path, os.O_CREAT | os.O_WRONLY) for path in paths]
    yield descriptors, lambda: [path.read_bytes() for path in paths]
    for descriptor in descriptors:
        os.close(descriptor)


def write_and_close(descriptor, *pieces):
    for piece in pieces:
        os.write(descriptor, piece)
    os.close(descriptor)


def test_lines_carry_the_number_of_their_process_and_keep_their_stream(sink):
    descriptors, read = sink
    pipes = [[os.pipe(), os.pipe()] for _ in range(2)]
    screen = Screen(*descriptors)
    reader = OutputReader([(out[0], err[0]) for out, err in pipes], screen)
    write_and_close(pipes[0][0][1], b"one\ntw", b"o\n\xff\xfe\nlast")
    write_and_close(pipes[0][1][1], b"[Gloo] Rank 0 is connected to 1 peer ranks.\nwarning\n")
    write_and_close(pipes[1][0][1], b"\n  [Gloo] Rank 1 is\nsaid [Gloo] Rank\n")
    write_and_close(pipes[1][1][1], b"trouble")
    reader.close()
    screen.close()
    out, err = read()
    assert sorted(out.splitlines()) == sorted(
        [b"one", b"two", b"\xff\xfe", b"last", b"[1] ", b"[1] said [Gloo] Rank"]
    )
    assert sorted(err.splitlines()) == [b"[1] trouble", b"warning"]
    for pipe in [end for process in pipes for end in process]:
        os.close(pipe[0])


def test_what_is_held_open_by_somebody_else_does_not_hold_up_the_end(sink):
    descriptors, read = sink
    out, err = os.pipe(), os.pipe()
    screen = Screen(*descriptors)
    reader = OutputReader([(out[0], err[0])], screen)
    os.write(out[1], b"said\nand half")
    reader.close()
    screen.close()
    assert read()[0] == b"said\nand half\n"
    for descriptor in (*out, *err):
        os.close(descriptor)


def test_output_that_nobody_reads_is_dropped_and_that_is_told():
    reading, writing = os.pipe()
    screen = Screen(writing, writing, patience=0.01)
    lines = [b"%07d\n" % number * 1000 for number in range(400)]
    for piece in lines:  # never ends if anything waits for the reader
        screen.show(piece)
    screen.log("own")
    received = []

    def read():
        while data := os.read(reading, 65536):
            received.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: b"launch: own" in b"".join(received))
    screen.close()
    os.close(writing)
    reader.join()
    os.close(reading)
    shown = b"".join(received).decode().splitlines()
    kept = [line for line in shown if not line.startswith("launch: ")]
    reported = [line.split()[1] for line in shown if "were not read in time" in line]
    assert sum(int(number.replace(",", "")) for number in reported) == 400_000 - len(kept) > 0
    assert kept == sorted(kept)


def test_a_reader_that_is_gone_harms_nothing(sink):
    reading, writing = os.pipe()
    os.close(reading)
    screen = Screen(writing, sink[0][1])
    for _ in range(1000):
        screen.show(b"line\n")
    screen.show(b"still there\n", error=True)
    screen.close()
    os.close(writing)
    assert sink[1]()[1] == b"still there\n"


def test_a_descriptor_that_does_not_wait_gets_everything():
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    screen = Screen(theirs.fileno(), theirs.fileno())
    screen.show(b"x" * 5_000_000 + b"\n")
    received = 0
    while received < 5_000_001:
        received += len(ours.recv(1_000_000))
    screen.close()
    ours.close()
    theirs.close()


def test_the_status_stands_below_the_lines(sink):
    descriptors, read = sink
    screen = Screen(*descriptors, Console(width=20, force_terminal=True, color_system=None))
    screen.set_status("step 1")
    wait_until(lambda: b"step 1" in read()[0])
    screen.show(b"\xff line\n")
    screen.set_status("a status that is too long for it")
    wait_until(lambda: b"a status" in read()[0])
    screen.close()
    erase = b"\r\x1b[2K"
    out = read()[0]
    assert out.startswith(erase + b"step 1" + erase + b"\xff line\n" + erase)
    assert out.endswith(erase + "a status that is to…".encode() + erase)


def test_signals_ask_and_then_insist():
    with default_signals(), open_mailbox() as mailbox:
        requests = StopRequests(mailbox)
        requests.update()
        assert requests.first is None
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # a closed terminal may send two
        requests.update()
        assert (requests.first, requests.second) == (signal.SIGHUP, None)
        signal.raise_signal(signal.SIGINT)
        requests.update()
        assert requests.second is signal.SIGINT


def test_a_signal_that_is_ignored_stays_ignored_and_handlers_come_back():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with open_mailbox() as mailbox:
            signal.raise_signal(signal.SIGHUP)
            assert mailbox.read() == []
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGHUP) == before


def test_free_addresses_differ_and_are_free():
    addresses = free_addresses(50)
    assert len(set(addresses)) == 50
    host, _, port = addresses[0].rpartition(":")
    with socket.socket() as listener:
        listener.bind((host, int(port)))
