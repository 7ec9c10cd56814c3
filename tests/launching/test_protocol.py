"""Messages between the processes and their supervisor."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from ftrain.launching import Done, Failed, Progress, Stopped, decode, encode
from ftrain.launching.child_environment import child_variables
from ftrain.launching.protocol import MAX_LINE, VARIABLES

STEP = st.integers(0, 2**63)
WORD = st.text(max_size=200)
ANY_TEXT = st.text(st.characters(codec=None), max_size=6000)  # lone surrogates too
BUSY = st.builds(
    Progress, st.none() | STEP, st.none() | STEP, st.none() | st.floats(allow_nan=False), WORD
)
STEPPING = st.builds(Progress, STEP, st.none() | STEP, st.none() | st.floats(allow_nan=False))
FAILED = st.builds(Failed, WORD, WORD, st.booleans()) | st.builds(
    Failed, WORD, WORD, st.just(True), STEP
)
MESSAGES = BUSY | STEPPING | FAILED | st.builds(Stopped, WORD) | st.builds(Done, STEP)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = [
    "step",
    "steps",
    "loss",
    "busy",
    "failed",
    "message",
    "retry",
    "because",
    "stopped",
    "done",
]


@given(MESSAGES)
def test_what_is_told_is_heard(message):
    assert decode(encode(message)) == message


def test_the_forms_of_the_protocol():
    assert decode(b'{"step": 120, "steps": 2000, "loss": 0.123}') == Progress(120, 2000, 0.123)
    assert decode(b'{"busy": "compiling"}') == Progress(busy="compiling")
    assert decode(b'{"failed": "NonFiniteError", "message": "m", "retry": false}') == Failed(
        "NonFiniteError", "m", False
    )
    assert decode(b'{"failed": "PeerFailed", "message": "m", "because": 2}') == Failed(
        "PeerFailed", "m", because=2
    )
    assert decode(b'{"stopped": "SIGTERM"}') == Stopped("SIGTERM")
    assert decode(b'{"done": 2000}') == Done(2000)
    assert json.loads(encode(Failed("NonFiniteError", "m", retry=False))) == {
        "failed": "NonFiniteError",
        "message": "m",
        "retry": False,
    }


@given(ANY_TEXT, ANY_TEXT, st.sampled_from([Failed, Stopped, Progress]))
@example("\U0001f600" * 6000, "\U0001f600" * 6000, Failed)
@example("", "\0" * 6000, Failed)
def test_a_line_is_never_too_long_for_a_pipe(kind, text, form):
    message = {
        Failed: Failed(kind, text),
        Stopped: Stopped(text),
        Progress: Progress(1, busy=text),
    }[form]
    line = encode(message)
    assert len(line) <= MAX_LINE
    assert line.count(b"\n") == 1
    received = decode(line)
    assert isinstance(received, form)
    if isinstance(received, Failed):
        assert text.startswith(received.message)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b"[" * MAX_LINE)
@example(b'{"a":' * 800)
@example(b'{"step": ' + b"9" * 4000 + b"}")
@example(b'{"step": 1, "loss": ' + b"9" * 4000 + b"}")
@example(b'{"step": NaN, "loss": Infinity}')
@example(b'{"step": true}')
@example(b'{"step": 1e5}')
def test_no_line_can_do_harm(line):
    message = decode(line)
    assert message is None or isinstance(message, Progress | Failed | Stopped | Done)


@given(st.dictionaries(st.sampled_from(NAMES), JSON))
def test_no_value_can_do_harm(fields):
    message = decode(json.dumps(fields).encode())
    if isinstance(message, Progress):
        assert message.step is None or (type(message.step) is int and message.step >= 0)
        assert message.loss is None or type(message.loss) is float
    if isinstance(message, Done):
        assert type(message.step) is int
        assert message.step >= 0


def test_the_environment_of_a_process():
    given = child_variables(
        1,
        ["127.0.0.1:1", "127.0.0.1:2"],
        hang_timeout=1234567.5,
        attempt=3,
        inject="kill rank=0 step=1",
        gpus=2,
    )
    assert json.loads(given["FTRAIN_CLUSTER"]) == {
        "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
        "task": {"type": "worker", "index": 1},
    }
    assert float(given["FTRAIN_HANG_TIMEOUT"]) == 1234567.5
    assert given["FTRAIN_ATTEMPT"] == "3"
    assert given["FTRAIN_INJECT"] == "kill rank=0 step=1"
    assert given["JAX_CUDA_VISIBLE_DEVICES"] == "2,3"


def test_what_was_not_asked_for_is_not_given():
    given = child_variables(0, ["127.0.0.1:1"], hang_timeout=1, attempt=0, inject=None, gpus=None)
    assert (
        set(given) == {"FTRAIN_CLUSTER", "FTRAIN_HANG_TIMEOUT", "FTRAIN_ATTEMPT"} < set(VARIABLES)
    )
