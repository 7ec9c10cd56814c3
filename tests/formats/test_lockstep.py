"""Batches parsed in lock-step and records parsed one by one give the same arrays and errors."""

import random
import threading

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.formats.examples.features import Fixed, Padded, Ragged, SpecError
from ftrain.formats.examples.messages import Example, encode_example
from ftrain.formats.examples.parsing import ExampleParser, parse_examples

SPEC = {
    "f": Ragged("float32"),
    "i": Ragged("int64"),
    "b": Ragged("bytes"),
    "long-name": Ragged("int64"),
}
TAGS = {"bytes": b"\x0a", "float": b"\x12", "int": b"\x1a"}


def varint(number, padding=0):
    parts = []
    while number >= 128 or padding:
        parts.append(number & 127 | 128)
        padding -= number < 128
        number >>= 7
    return bytes([*parts, number])


def field(tag, body, rng=None):
    """Sometimes the length has more bytes than it needs."""
    return tag + varint(len(body), rng.choice((0, 0, 0, 0, 1, 2, 5)) if rng else 0) + body


def integers(rng, count):
    return [
        rng.choice((0, 1, -1, 127, 128, rng.getrandbits(rng.randint(1, 63)), -rng.getrandbits(62)))
        for _ in count
    ]


def values_of(kind, rng, count):
    if kind == "float":
        return [rng.randbytes(4) for _ in range(count)]
    if kind == "bytes":
        return [rng.randbytes(rng.choice((0, 1, 3, 8, 70, 130))) for _ in range(count)]
    return [varint(number % 2**64) for number in integers(rng, range(count))]


def list_of(kind, rng, count, odd):
    values = values_of(kind, rng, count)
    if kind == "bytes":
        body = b"".join(field(b"\x0a", value, odd) for value in values)
    elif odd and rng.random() < 0.3:  # not packed
        body = b"".join({"float": b"\x0d", "int": b"\x08"}[kind] + value for value in values)
    else:
        cut = rng.randint(0, count) if odd and rng.random() < 0.3 else count  # in two pieces
        parts = [values[:cut], values[cut:]] if cut < count else [values]
        body = b"".join(field(b"\x0a", b"".join(part), odd) for part in parts if part)
    return field(TAGS[kind], body, odd)


def entry_of(key, kind, rng, count, odd):
    feature = b"" if kind is None else list_of(kind, rng, count, odd)
    parts = [field(b"\x0a", key.encode(), odd), field(b"\x12", feature, odd)]
    if odd:
        unknown = rng.choice((b"\x22\x01u", b"\x28\x05", b"\x35abcd", b"\x43\x44", b"\x0a\xff"))
        rng.choice(
            (
                lambda: parts.reverse(),
                lambda: parts.pop(rng.randrange(2)),
                lambda: parts.insert(rng.randrange(3), unknown),
                lambda: parts.append(field(b"\x12", list_of("int", rng, 1, None))),
                lambda: parts.append(field(b"\x12", unknown)),
                lambda: None,
            )
        )()
    return field(b"\x0a", b"".join(parts), odd)


def random_record(rng, shape, oddness):
    entries = []
    for key, kind, count in shape:
        odd = rng if rng.random() < oddness else None
        entries.append(entry_of(key, kind, rng, rng.randint(0, 3) if count is None else count, odd))
        if odd and rng.random() < 0.2:
            entries.append(entry_of(key, kind, rng, 1, None))
    features = field(b"\x0a", b"".join(entries), rng if rng.random() < oddness else None)
    if rng.random() < oddness / 4:
        features += rng.choice((features, b"\x12\x01x", b"\x0a\x00"))
    return mutate(rng, features) if rng.random() < oddness / 4 else features


def mutate(rng, data):
    place = rng.randrange(len(data) + 1)
    replaced = bytes([rng.getrandbits(8)])
    return rng.choice(
        (
            data[:place],
            data[:place] + replaced + data[place + 1 :],
            data[:place] + replaced + data[place:],
        )
    )


def random_records(rng):
    kinds = {
        "f": "float",
        "i": "int",
        "b": "bytes",
        "long-name": "int",
        "other": rng.choice(("int", "bytes", "float")),
    }
    shapes = []
    for _ in range(rng.randint(1, 4)):
        keys = rng.sample(sorted(kinds), rng.randint(0, len(kinds)))
        shape = [(key, kinds[key], rng.choice((None, 0, 1, 1, 2, 40))) for key in keys]
        shapes.append(
            [(key, None if rng.random() < 0.05 else kind, count) for key, kind, count in shape]
        )
    oddness = rng.choice((0, 0, 0.02, 0.3))
    return [random_record(rng, rng.choice(shapes), oddness) for _ in range(rng.randint(16, 80))]


def one_by_one(records, spec):
    """Arrays by name in a list for each record; where one is damaged, the error's text instead."""
    results = []
    for number, record in enumerate(records):
        try:
            results.append(
                parse_examples([record], spec, where=lambda _, number=number: f"record {number}")
            )
        except SpecError as error:
            results.append(str(error))
    return results


def check_equal(records, spec=SPEC, parse=None):
    alone = one_by_one(records, spec)
    errors = [result for result in alone if isinstance(result, str)]
    if errors:
        with pytest.raises(SpecError) as caught:
            parse_examples(records, spec)
        assert str(caught.value) in errors
        return
    together = (parse or ExampleParser(spec))(records)
    for name, column in together.items():
        wanted = np.concatenate([result[name] for result in alone])
        assert column.dtype == wanted.dtype
        for ours, theirs in zip(column, wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**48))
def test_a_batch_says_what_its_records_say(seed):
    check_equal(random_records(random.Random(seed)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**48))
def test_a_parser_that_has_seen_other_batches_says_the_same(seed):
    rng = random.Random(seed)
    parse = ExampleParser(SPEC)
    for _ in range(4):
        check_equal(random_records(rng), parse=parse)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**48))
def test_messages_decode_to_the_same_values(seed):
    """Compare with protobuf's own lists: single records and batches share a decoder of payloads."""
    records = random_records(random.Random(seed))
    try:
        messages = [Example.FromString(record).features.feature for record in records]
        arrays = parse_examples(records, SPEC)
    except (DecodeError, SpecError):
        return
    lists = {"f": "float_list", "i": "int64_list", "b": "bytes_list", "long-name": "int64_list"}
    for name, kind in lists.items():
        for values, message in zip(arrays[name], messages, strict=True):
            wanted = list(getattr(message[name], kind).value) if name in message else []
            np.testing.assert_array_equal(values, np.array(wanted, values.dtype))


def batch(count=40, **features):
    rng = np.random.default_rng(0)
    common = {"x": rng.normal(size=3).astype(np.float32), "label": 5, "name": b"abc"} | features
    return [encode_example(common | {"label": int(rng.integers(0, 2**20))}) for _ in range(count)]


def test_records_that_differ_in_the_sizes_of_their_lengths_stay_together():
    names = [b"n" * size for size in range(100, 300)]
    records = [encode_example({"name": name, "z": np.arange(len(name))}) for name in names]
    arrays = parse_examples(
        records, {"name": Fixed((), "bytes"), "z": Padded("int32", lengths="size")}
    )
    assert arrays["name"].tolist() == names
    assert arrays["size"].tolist() == list(range(100, 300))
    assert arrays["z"][7, :108].tolist() == [*range(107), 0]


@pytest.mark.parametrize("size", range(1, len(batch()[17])))
def test_a_cut_record_in_a_batch_is_an_error_that_names_it(size):
    records = batch()
    records[17] = records[17][:size]
    with pytest.raises(SpecError, match=rf"record 17: its {size} bytes are not a valid Example"):
        parse_examples(records, {"x": Fixed((3,))})


def test_a_record_of_no_bytes_is_an_example_without_features():
    records = batch()
    records[17] = b""
    with pytest.raises(SpecError, match=r"record 17: feature x has no values"):
        parse_examples(records, {"x": Fixed((3,))})


@pytest.mark.parametrize(
    "record",
    [
        b"\x0a" + varint(2**60) + b"abc",
        b"\x0a\x06\x0a" + varint(2**31) + b"",
        b"\x0a\xff\xff\xff\xff\x7f",
        b"\x0b" * 5000,
        b"\x0a\xff\xff\xff\x7f" + b"\x0a" * 50,
        b"\xff" * 300,
    ],
    ids=["huge", "huge entry", "five bytes", "nested groups", "too long", "no varint"],
)
@pytest.mark.parametrize("copies", [1, 40])
def test_nonsense_is_a_clean_error(record, copies):
    with pytest.raises(SpecError, match=r"record 0: its \d+ bytes are not a valid Example"):
        parse_examples([record] * copies, SPEC)


def test_damage_in_a_feature_that_is_not_wanted_is_damage():
    records = batch(ints=np.arange(1, 40))
    place = records[9].index(bytes(range(1, 40)))
    records[9] = records[9][: place + 5] + b"\xff" * 12 + records[9][place + 17 :]
    with pytest.raises(SpecError, match=r"record 9: its \d+ bytes are not a valid Example"):
        parse_examples(records, {"x": Fixed((3,))})


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize("wanted", [True, False])
def test_an_integer_that_does_not_end_is_damage(size, wanted):
    records = batch(i=[1] * size)
    records[9] = records[9].replace(b"\x01" * size, b"\x81" * size)
    with pytest.raises(SpecError, match=r"record 9: its \d+ bytes are not a valid Example"):
        parse_examples(records, {"i": Ragged("int64")} if wanted else {"x": Fixed((3,))})


def test_a_million_entries_in_a_record_do_not_take_long():
    bomb = field(b"\x0a", b"\x0a\x00" * 1_000_000)
    arrays = parse_examples([bomb] * 16, {"x": Fixed((), default=1.5)})
    assert arrays["x"].tolist() == [1.5] * 16


def test_threads_may_share_a_parser():
    parse = ExampleParser({"x": Fixed((3,)), "label": Fixed((), "int64")})
    failures = []
    batches = [batch(30), batch(50, extra=1.5), batch(40, name=b"n" * 200)]

    def work(records):
        wanted = ExampleParser(parse.spec)(records)["label"]
        failures.extend(1 for _ in range(50) if (parse(records)["label"] != wanted).any())

    threads = [threading.Thread(target=work, args=(records,)) for records in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
