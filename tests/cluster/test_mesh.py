import contextlib
import itertools
import json
import math
import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ftrain.cluster.mesh import (
    AXES,
    BATCH_AXES,
    batch_shard,
    check_processes,
    make_mesh,
    sizes,
    split_batch,
)

SIZE = st.sampled_from([-1, 1, 2, 3, 4, 5, 6, 8, 12, 16])


def test_all_devices_or_as_many_as_asked_for():
    assert make_mesh().shape == {"data": 4, "fsdp": 1, "model": 1}
    assert make_mesh(2).shape == make_mesh(data=2).shape == {"data": 2, "fsdp": 1, "model": 1}
    assert make_mesh(fsdp=2).shape == {"data": 2, "fsdp": 2, "model": 1}
    assert make_mesh(1, fsdp=-1, model=2).shape == {"data": 1, "fsdp": 2, "model": 2}
    assert make_mesh(1, 1, 3).axis_types == (AxisType.Auto,) * 3


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -2, 99])
def test_a_size_that_cannot_be_says_how_many_devices_there_are(axis, size):
    with pytest.raises(
        ValueError,
        match=rf"^{axis} must be -1 or between 1 and the 4 available devices, got {size}$",
    ):
        make_mesh(**{axis: size})


@pytest.mark.parametrize(
    ("requested", "devices", "options", "message"),
    [
        (
            (-1, 3, 1),
            4,
            {},
            "fsdp must be 1, 2 or 4, got 3; "
            "with data=-1, model=1 the mesh must fill the 4 available devices",
        ),
        (
            (-1, 2, 3),
            8,
            {},
            "model must be 1, 2 or 4, got 3; "
            "with data=-1, fsdp=2 the mesh must fill the 8 available devices",
        ),
        ((-1, 3, 5), 8, {}, "fsdp=3 x model=5 must divide the 8 available devices"),
        (
            (4, 2, 1),
            4,
            {},
            "data must be between 1 and 2, got 4; with fsdp=2, model=1 the mesh must fit the 4",
        ),
        ((3, 3, 3), 8, {}, "data=3 x fsdp=3 x model=3 must fit the 8 available devices"),
        (
            (8, 4, 1),
            64,
            {"fill": True},
            "data must be 16 or -1, got 8; with fsdp=4, model=1 the mesh must fill",
        ),
        (
            (-1, -1, 1),
            4,
            {},
            "only one axis of a mesh can be -1, the rest of the devices; got data=-1, fsdp=-1",
        ),
    ],
)
def test_sizes_that_do_not_fit_name_those_that_would(requested, devices, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        sizes(*requested, devices, **options)


@given(st.tuples(SIZE, SIZE, SIZE), st.integers(1, 64), st.booleans())
def test_sizes_are_kept_or_refused_with_advice_that_holds(requested, devices, fill):
    candidates = [range(1, devices + 1) if size == -1 else [size] for size in requested]
    filling = [each for each in itertools.product(*candidates) if math.prod(each) == devices]
    fits = math.prod(requested) <= devices and -1 not in requested and not fill
    try:
        found = tuple(sizes(*requested, devices, fill=fill).values())
    except ValueError as error:
        assert not fits
        assert requested.count(-1) > 1 or not filling
        if advice := re.match(r"(\w+) must be (.+?), got (-?\d+); with", str(error)):
            _follow(requested, devices, fill, *advice.groups())
    else:
        assert all(size in (-1, chosen) for size, chosen in zip(requested, found, strict=True))
        assert found in filling or (fits and found == requested)


def _follow(requested, devices, fill, axis, choices, got):
    """Exactly the values that an error suggests must work."""
    named = dict(zip(AXES, requested, strict=True))
    assert named[axis] == int(got)
    numbers = set(map(int, re.findall(r"-?\d+", choices)))
    offered = set(range(1, max(numbers) + 1)) if "between" in choices else numbers
    good = set()
    for size in range(1, devices + 1):
        with contextlib.suppress(ValueError):
            good.add(sizes(**named | {axis: size}, devices=devices, fill=fill)[axis])
    assert good == offered - {-1}
    if -1 in offered:
        sizes(**named | {axis: -1}, devices=devices, fill=fill)


def test_a_batch_must_share_evenly():
    assert split_batch(12, make_mesh(4)) == 3
    assert split_batch(12, make_mesh(fsdp=2)) == 3
    assert split_batch(12, make_mesh(2, model=2)) == 6
    assert split_batch(128, {"data": 16, "fsdp": 4, "model": 8}) == 2
    with pytest.raises(
        ValueError,
        match=r"batch_size 14 does not divide over the 4 devices of the mesh; use 12 or 16$",
    ):
        split_batch(14, make_mesh(4))
    with pytest.raises(
        ValueError, match=r"over the 64 devices of the mesh along data and fsdp; use 64$"
    ):
        split_batch(14, {"data": 16, "fsdp": 4, "model": 8})


def test_a_mesh_of_the_users_own_has_shards_too():
    mesh = jax.make_mesh((2, 2), ("model", "data"), axis_types=(AxisType.Auto,) * 2)
    assert batch_shard(mesh) == (0, 1)
    assert split_batch(12, mesh) == 6


def test_a_topology_that_jax_has_no_layout_for_still_makes_a_mesh(monkeypatch):
    monkeypatch.setattr(
        jax, "make_mesh", mock.Mock(side_effect=NotImplementedError("no assignment for this torus"))
    )
    mesh = make_mesh(2, 2)
    assert mesh.shape == {"data": 2, "fsdp": 2, "model": 1}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2, 3]


def pretend_mesh(owners, shape) -> SimpleNamespace:
    devices = np.array([SimpleNamespace(process_index=owner) for owner in owners]).reshape(shape)
    return SimpleNamespace(
        axis_names=AXES, devices=devices, shape=dict(zip(AXES, shape, strict=True))
    )


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_the_slices_of_processes_are_the_parts_that_their_devices_hold(processes, each, data):
    count = processes * each
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    model = data.draw(st.sampled_from(divisors))
    fsdp = data.draw(st.sampled_from([n for n in divisors if count // model % n == 0]))
    mesh = pretend_mesh(np.repeat(range(processes), each), (count // model // fsdp, fsdp, model))
    parts = count // model
    fits = each % model == 0 or model % each == 0
    for process in range(processes):
        with mock.patch.object(jax, "process_index", lambda process=process: process):
            if not fits:
                with pytest.raises(
                    ValueError, match="give all processes the same number of devices"
                ):
                    batch_shard(mesh)
                continue
            index, shards = batch_shard(mesh)
        rows = [{device.process_index for device in row} for row in mesh.devices.reshape(parts, -1)]
        own = [part for part, holders in enumerate(rows) if process in holders]
        assert parts % shards == 0
        assert own == list(range(index * parts // shards, (index + 1) * parts // shards))


@pytest.mark.parametrize(
    ("owners", "reported"),
    [
        (
            [0, 1, 0, 1],
            "with data=4, fsdp=1, model=1, of 4 parts "
            "process 0 has 0 and 2, process 1 has 1 and 3;",
        ),
        ([0, 1, 1, 1], "process 0 has 0, process 1 has 1, 2 and 3;"),
        ([0, 1, 1, 0], "process 0 has 0 and 3, process 1 has 1 and 2;"),
    ],
)
def test_every_process_refuses_parts_that_are_no_slices(owners, reported):
    for process in (0, 1):  # both, or one would wait for the other
        with (
            mock.patch.object(jax, "process_index", lambda process=process: process),
            pytest.raises(ValueError, match=re.escape(reported)),
        ):
            batch_shard(pretend_mesh(owners, (4, 1, 1)))


def test_a_process_without_a_device_in_the_mesh_is_told():
    with pytest.raises(
        ValueError,
        match=r"process 0 has no device in the mesh, whose devices are of process 1 and 2$",
    ):
        batch_shard(pretend_mesh([1, 2], (2, 1, 1)))


def test_two_processes_hold_the_slices_that_they_load():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, __file__, str(port)]
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": environment,
    }
    processes = [subprocess.Popen([*command, str(rank)], **options) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    for rank, (out, _) in enumerate(outputs):
        reported = json.loads(out.splitlines()[-1])
        assert reported["too few"].startswith(
            "data must be 4 or -1, got 2; with fsdp=1, model=1 the mesh must fill"
        )
        assert reported["shards"] == {
            "4,1,1": [rank, 2],
            "2,1,2": [rank, 2],
            "1,4,1": [rank, 2],
            "1,1,4": [0, 1],
        }
        assert reported["interleaved"] == reported["refused"] == [rank, 2]


def load_and_compare(mesh: Mesh) -> tuple[int, int]:
    """Load a batch, check it on the devices, and return the shard of this process."""
    batch = np.arange(8)
    index, count = batch_shard(mesh)
    own = np.split(batch, count)[index]
    array = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec(BATCH_AXES)), own, (8,)
    )
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, batch[shard.index])
    return index, count


def as_process(port: str, rank: str) -> None:
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, 2, int(rank), coordinator_bind_address=address, initialization_timeout=60
    )
    reported = {"shards": {}}
    for shape in ((4, 1, 1), (2, 1, 2), (1, 4, 1), (1, 1, 4)):
        reported["shards"][",".join(map(str, shape))] = load_and_compare(make_mesh(*shape))
    try:
        make_mesh(2)
    except ValueError as error:
        reported["too few"] = str(error)
    crossed = np.array(jax.devices())[[0, 2, 1, 3]].reshape(4, 1, 1)
    with mock.patch.object(jax, "make_mesh", return_value=Mesh(crossed, AXES)):
        reported["interleaved"] = load_and_compare(make_mesh())
    with mock.patch.object(jax, "make_mesh", side_effect=ValueError("several slices")):
        reported["refused"] = load_and_compare(make_mesh())
    print(json.dumps(reported), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    as_process(*sys.argv[1:])


def test_processes_that_need_not_be_there():
    assert check_processes(3, 1, batch_size=12) == {"data": 3, "fsdp": 1, "model": 1}
    assert check_processes(2, 2, batch_size=8, model=4) == {"data": 1, "fsdp": 1, "model": 4}
    with pytest.raises(ValueError, match="batch_size 8 does not divide over the 3 devices"):
        check_processes(3, 1, batch_size=8)
    with pytest.raises(ValueError, match="data must be 3 or -1, got 2"):
        check_processes(3, 1, batch_size=12, data=2)
    with pytest.raises(
        ValueError, match=r"each process must hold one slice .* but has 2 devices with .*model=3"
    ):
        check_processes(3, 2, batch_size=12, model=3)
