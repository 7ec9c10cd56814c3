import jax
import pytest

from ftrain.cluster import make_mesh, split_batch


def test_all_devices_or_as_many_as_asked_for():
    assert make_mesh().shape == {"data": len(jax.devices())}
    assert make_mesh(data=2).shape == {"data": 2}


@pytest.mark.parametrize("data", [0, -2, 99])
def test_a_mesh_that_does_not_fit_says_how_many_there_are(data):
    with pytest.raises(ValueError, match=f"between 1 and the 4 devices there are, got {data}"):
        make_mesh(data)


def test_a_batch_must_share_evenly():
    assert split_batch(12, make_mesh(4)) == 3
    with pytest.raises(ValueError, match="batch_size 14 does not divide over the 4 devices of the mesh; use 12"):
        split_batch(14, make_mesh(4))
