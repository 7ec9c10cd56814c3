import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ftrain.formats import DamagedRecordError, frame_record
from ftrain.summaries import MetricsFile, SummaryWriter, read_events, read_metrics


def accumulate(directory) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_scalars_and_texts(tmp_path):
    writer = SummaryWriter(tmp_path)
    for step in (10, 20):
        writer.write(step, {"loss": 1 / step, "sample": f"text {step}"})
    writer.close()
    accumulator = accumulate(tmp_path)
    assert [(e.step, pytest.approx(e.value)) for e in accumulator.Scalars("loss")] == [
        (10, 0.1),
        (20, 0.05),
    ]
    texts = accumulator.Tensors("sample")
    assert [(e.step, e.tensor_proto.string_val[0]) for e in texts] == [
        (10, b"text 10"),
        (20, b"text 20"),
    ]
    assert accumulator.SummaryMetadata("sample").plugin_data.plugin_name == "text"


def test_what_is_written_can_be_read_at_once(tmp_path):
    writer = SummaryWriter(tmp_path)
    writer.write(1, {"loss": 2.0})
    assert [event.step for event in read_events(writer.path) if event.HasField("summary")] == [1]
    writer.close()


def test_a_resumed_run_replaces_the_steps_it_takes_again(tmp_path):
    first = SummaryWriter(tmp_path)
    for step in (100, 200, 300):
        first.write(step, {"loss": float(step)})
    first.close()
    second = SummaryWriter(tmp_path, start_step=200)
    second.write(300, {"loss": -300.0})
    second.close()
    assert [(e.step, e.value) for e in accumulate(tmp_path).Scalars("loss")] == [
        (100, 100),
        (200, 200),
        (300, -300),
    ]


def test_a_run_that_starts_anew_replaces_everything(tmp_path):
    for sign in (1.0, -1.0):
        writer = SummaryWriter(tmp_path)
        writer.write(100, {"loss": sign})
        writer.close()
    assert [(e.step, e.value) for e in accumulate(tmp_path).Scalars("loss")] == [(100, -1.0)]


def test_metrics_are_lines_of_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(1, {"loss": 0.5, "bad": math.nan, "worse": -math.inf, "sample": "a\nb"})
    file.close()
    line = json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert line | {"time": 0} == {
        "step": 1,
        "time": 0,
        "loss": 0.5,
        "bad": "nan",
        "worse": "-inf",
        "sample": "a\nb",
    }


def test_a_resumed_run_drops_later_lines_and_a_torn_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    with pytest.warns(UserWarning, match=r"line 4 cannot be read.*moved to .*metrics\.jsonl\.bad"):
        file = MetricsFile(path, start_step=2)
    file.write(3, {"again": 1.0})
    file.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(path)[-1]["again"] == 1.0


NUMBERS = {
    "int": 3,
    "bool": True,
    "float32": np.float32(3.0),
    "numpy": np.array(3),
    "jax": jnp.array(3.0),
    "half": jnp.array(3.0, jnp.bfloat16),
}


def test_numbers_of_numpy_and_jax_are_written_as_numbers(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        writer.write(jnp.array(7), NUMBERS)
    expected = {name: float(value) for name, value in NUMBERS.items()}
    accumulator = accumulate(tmp_path)
    assert {name: accumulator.Scalars(name)[0].value for name in NUMBERS} == expected
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(np.int64(7), NUMBERS)
    file.close()
    line = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert {name: line[name] for name in NUMBERS} == expected
    assert line["step"] == 7


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            np.ones((2, 3), np.float32),
            r"gradients/norm is an array of shape \(2, 3\) and dtype float32; expected a num",
        ),
        (
            jnp.ones(1),
            r"gradients/norm is an array of shape \(1,\) and dtype float32; "
            r"expected a number, an array of shape \(\) or a string",
        ),
        (np.array("x", object), r"gradients/norm is an array of shape \(\) and dtype object"),
        (np.complex64(1j), r"gradients/norm is an array of shape \(\) and dtype complex64"),
        ([1.0], r"gradients/norm is \[1.0\], a list; expected a number"),
        (None, "gradients/norm is None, a NoneType; expected a number"),
        (10**400, "gradients/norm is a whole number of 1329 bits, too large for a float"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_no_number_is_an_error_with_its_name(tmp_path, value, expected):
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = np.array(object(), object)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with SummaryWriter(tmp_path) as events:
        for writer in (events, file):
            with pytest.raises(TypeError, match=expected):
                writer.write(1, {"loss": 0.5, "gradients/norm": value})
        with pytest.raises(TypeError, match=r"a step must be a whole number, got 1\.5"):
            events.write(1.5, {"loss": 0.5})
        with pytest.raises(TypeError, match="the name of a value must be a string, got 3"):
            events.write(1, {3: 0.5})
    file.close()
    assert read_metrics(file.path) == []
    assert not [event for event in read_events(events.path) if event.HasField("summary")]


def test_a_traced_value_is_an_error_with_its_name(tmp_path):
    with (
        SummaryWriter(tmp_path) as writer,
        pytest.raises(TypeError, match="loss is an array of float32 that cannot be"),
    ):
        jax.jit(lambda loss: writer.write(1, {"loss": loss}))(1.0)


@pytest.mark.parametrize("payload", [b"\xff" * 20, b"\x0a\x05ab", b"\x2a\xff\xff\xff\xff\x7f"])
def test_a_record_that_is_not_an_event_is_an_error_with_its_place(tmp_path, payload):
    with SummaryWriter(tmp_path) as writer:
        writer.write(1, {"loss": 0.5})
    offset = writer.path.stat().st_size
    with open(writer.path, "ab") as file:
        file.write(frame_record(payload))
    found = []
    expected = rf"record 3 at byte {offset} is damaged: its {len(payload)} bytes are not an event"
    with pytest.raises(DamagedRecordError, match=expected):
        found.extend(event.step for event in read_events(writer.path))
    with pytest.raises(DamagedRecordError, match="more than max_record_bytes=1"):
        list(read_events(writer.path, max_record_bytes=1))
