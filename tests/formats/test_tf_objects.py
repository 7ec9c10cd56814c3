"""Object graphs and state files, which accompany the variables of TensorFlow checkpoints."""

import pytest
from bundles import FLOATS, FULL, STRING, attempt, entry, message, pack_strings, write
from hypothesis import given
from hypothesis import strategies as st

from ftrain.formats.tf_checkpoint import (
    TfCheckpoint,
    TfCheckpointError,
    format_state,
    latest_tf_checkpoint,
    parse_state,
)

# Objects


def node(children=(), attributes=(), slots=()):
    """A TrackableObject: children (id, name), attributes (name, key), slots (variable, name, id)"""
    return message(
        *((1, message((1, number), (2, name.encode()))) for number, name in children),
        *((2, message((1, name.encode()), (3, key.encode()))) for name, key in attributes),
        *(
            (3, message((1, variable), (2, name.encode()), (3, number)))
            for variable, name, number in slots
        ),
    )


def value(key):
    return [("VARIABLE_VALUE", key)]


def objects(folder, graph):
    data, crc = pack_strings([graph])
    entries = {b"_CHECKPOINTABLE_OBJECT_GRAPH": entry(STRING, (), data=data, crc=crc)}
    return TfCheckpoint(write(folder, entries, data)).objects()


def graph_of(*nodes):
    return message(*((1, each) for each in nodes))


def test_objects_are_named_by_their_shortest_path_also_in_a_cycle(tmp_path):
    graph = graph_of(
        node([(1, "far"), (2, "near/by")]),
        node([(2, "long"), (0, "back"), (1, "self"), (8, "short")], value("one")),
        node(
            [(1, "round"), (6, "deep")],
            [*value("two"), ("CONFIG", "two.config")],
            [(1, "m", 3), (4, "lost", 5)],
        ),
        node([], value("slot")),
        node([], value("out of reach")),
        node([], value("slot of what is out of reach")),
        node([(7, "deeper")]),
        node([(8, "end")]),
        node([], value("three")),
    )
    wanted = {
        "far": "one",
        "near/by": "two",
        "near/by/CONFIG": "two.config",
        "far/near/by/m": "slot",
    }
    assert objects(tmp_path, graph) == wanted | {"far/short": "three"}


def chain(length):
    return graph_of(*(node([(number + 1, "n" * 10)]) for number in range(length)), node())


BAD_GRAPHS = {
    "a child that is not there": (
        graph_of(node([(7, "x")])),
        "refers to object 7, expected less than 1",
    ),
    "a negative child": (graph_of(node([(-1, "x")])), "refers to object -1"),
    "a slot that is not there": (graph_of(node(slots=[(0, "m", 9)])), "refers to object 9"),
    "a slot of what is not there": (graph_of(node(slots=[(9, "m", 0)])), "refers to object 9"),
    "two of a path": (
        graph_of(node([(1, "x"), (2, "x")]), *(node([], value(key)) for key in "ab")),
        "'a' and 'b'",
    ),
    "garbage": (b"\xff\xff", "not a valid TrackableObjectGraph"),
    "a name that is not UTF-8": (
        graph_of(message((1, message((1, 0), (2, b"\xff"))))),
        "not a valid TrackableObjectGraph",
    ),
    "paths that unfold": (chain(20000), "the paths of its objects have more than"),
}


@pytest.mark.parametrize(("graph", "reason"), BAD_GRAPHS.values(), ids=BAD_GRAPHS)
def test_a_hostile_object_graph_is_refused_with_its_reason(tmp_path, graph, reason):
    with pytest.raises(
        TfCheckpointError, match=f"model.index: _CHECKPOINTABLE_OBJECT_GRAPH: .*{reason}"
    ):
        objects(tmp_path, graph)


def test_an_object_graph_may_be_empty_or_deep_but_must_be_a_string(tmp_path):
    assert objects(tmp_path, b"") == {}
    assert objects(tmp_path, chain(1000)) == {}
    prefix = write(tmp_path, {b"_CHECKPOINTABLE_OBJECT_GRAPH": FULL}, FLOATS)
    with pytest.raises(TfCheckpointError, match="expected a single string"):
        TfCheckpoint(prefix).objects()


small = st.integers(-1, 4)
references = st.lists(st.tuples(small, st.text(max_size=2)), max_size=3)
attributes = st.lists(
    st.tuples(st.sampled_from(["VARIABLE_VALUE", "x", ""]), st.text(max_size=2)), max_size=2
)
nodes = st.builds(
    node, references, attributes, st.lists(st.tuples(small, st.text(max_size=2), small), max_size=2)
)


@given(st.lists(nodes, max_size=5).map(lambda made: graph_of(*made)) | st.binary(max_size=50))
def test_any_object_graph_has_paths_or_is_refused(tmp_path_factory, graph):
    found = attempt(lambda: objects(tmp_path_factory.mktemp("graph"), graph))
    if isinstance(found, dict):
        assert all(isinstance(text, str) for pair in found.items() for text in pair)


# The file named `checkpoint`


def test_a_state_file_may_have_timestamps_escapes_and_comments():
    state = parse_state(
        """
        # as tf.train.CheckpointManager writes it
        model_checkpoint_path: "a\\"\\\\\\303\\244\\n"
        all_model_checkpoint_paths: 'ckpt-1'
        all_model_checkpoint_paths: "a\\"\\\\ä\\n"
        all_model_checkpoint_timestamps: 1573000000.25
        all_model_checkpoint_timestamps: 1.5730001e9
        last_preserved_timestamp: 1572999999.5
        """
    )
    assert state == ('a"\\ä\n', ("ckpt-1", 'a"\\ä\n'))
    assert parse_state("") == (None, ())


@pytest.mark.parametrize(
    "text",
    [
        "garbage",
        "model_checkpoint_path: 3",
        'model_checkpoint_path: "a',
        'model_checkpoint_path: "a" model_checkpoint_path: "b"',
        'model_checkpoint_path: "\\377"',
        'model_checkpoint_path: "\\777"',
        'model_checkpoint_path: "\\m"',
        'model_checkpoint_path: "\\x"',
        'model: "a"',
        "last_preserved_timestamp: now",
        "all_model_checkpoint_paths { }",
        "\0",
    ],
)
def test_a_state_file_of_garbage_is_refused(text):
    with pytest.raises(TfCheckpointError, match="not the text of a checkpoint state"):
        parse_state(text)


@given(st.text(min_size=1), st.lists(st.text()))
def test_a_state_that_is_written_is_read_whatever_the_paths(latest, kept):
    assert parse_state(format_state(latest, [*kept, latest])) == (latest, (*kept, latest))


@given(st.data())
def test_any_text_is_a_state_or_is_refused(data):
    text = (
        'model_checkpoint_path: "m-7"\nall_model_checkpoint_paths: ["m-1", "m-7"]\n'
        "last_preserved_timestamp: 1.5\n"
    )
    at, end = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(text))])))
    characters = st.text(
        st.characters() | st.sampled_from("\"'\\\\\\{}[]<>:;,#_\n m0x\ud800"), max_size=10
    )
    changed = text[:at] + data.draw(characters) + text[end:]
    state = attempt(lambda: parse_state(changed))
    if not isinstance(state, TfCheckpointError):
        assert all(isinstance(path, str) for path in state.all)


def test_the_latest_checkpoint_is_the_named_one_if_its_index_is_there(tmp_path):
    assert latest_tf_checkpoint(tmp_path / "nowhere") is None
    assert latest_tf_checkpoint(tmp_path) is None
    prefix = write(tmp_path / "out", {}, b"")
    state = tmp_path / "checkpoint"
    for text, wanted in [
        (format_state("out/model", []), tmp_path / "out/model"),
        (format_state(str(prefix), []), prefix),
        (format_state("out/gone", ["out/model"]), None),
        (format_state("out/nul\0", []), None),
        ("", None),
    ]:
        state.write_text(text)
        assert latest_tf_checkpoint(str(tmp_path)) == wanted
    for garbage in [b"garbage", b'model_checkpoint_path: "\xff"']:
        state.write_bytes(garbage)
        with pytest.raises(TfCheckpointError, match=f"^{state}: "):
            latest_tf_checkpoint(tmp_path)
