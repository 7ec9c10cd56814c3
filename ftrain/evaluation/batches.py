"""Batches for an evaluation: all of the data, each batch padded to one size and with a mask."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ftrain.cluster import batch_shard
from ftrain.cluster.mesh import BATCH_AXES
from ftrain.data import Pipeline
from ftrain.data.masking import MASK, append_padding
from ftrain.data.prefetch import check_data
from ftrain.data.shapes import check_integers, check_numbers
from ftrain.training.compiled_step import batch_sharding, put_batch
from ftrain.training.consensus import check_shards
from ftrain.training.loss import Batch


def check_evaluated(data: Pipeline | Iterable[Any], mesh: Mesh | None) -> None:
    """Raise unless `data` end, have all examples, and are this process's part of them."""
    check_data(data)
    is_spread = mesh is not None and mesh.is_multi_process
    if not isinstance(data, Pipeline):
        if is_spread:
            raise ValueError(
                "several processes need a Pipeline to evaluate: iterators may end at different "
                "batches, and a process would wait for ever"
            )
        return
    if data.steps is None:
        raise ValueError(
            "the pipeline never ends, so there is no end of the evaluation: Pipeline(..., epochs=1)"
        )
    if data.dropped:
        raise ValueError(
            f"the pipeline drops the last {data.dropped} examples, which fill no batch: "
            "Pipeline(..., last='pad')"
        )
    if is_spread:
        check_shards(data, mesh)
    elif data.shard_count > 1:
        raise ValueError(
            f"the pipeline yields part {data.shard_index} of {data.shard_count} of every batch, "
            "but the mesh has the devices of one process: mesh=ftrain.cluster.make_mesh()"
        )


class EvaluationBatches:
    """Pads batches, so that few programs are compiled, and puts them on the devices."""

    def __init__(self, data: Pipeline | Iterable[Any], mesh: Mesh | None):
        self._pipeline = data if isinstance(data, Pipeline) else None
        self._sharding = batch_sharding(mesh)
        self._parts = 1  # of the batch, on the devices of this process
        if mesh is not None and self._sharding is not None:
            parts = math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)
            self._parts = parts // batch_shard(mesh)[1]
        settings: Any = jax.config  # its attributes are defined at run time
        self._x64: bool = settings.jax_enable_x64
        self._sizes: dict[Any, int] = {}  # the largest batch, by names, dtypes and shapes of rows

    def prepare(self, batch: Any, step: int) -> tuple[Batch, Any]:
        """Return the batch and the weights of its examples, padded, on the devices."""
        rows = _check_batch(batch)
        count = len(next(iter(rows.values())))
        form = tuple((name, array.dtype, array.shape[1:]) for name, array in rows.items())
        size = max(self._sizes.get(form, 0), -(-count // self._parts) * self._parts, self._parts)
        self._sizes[form] = size
        mask = np.ones(count, np.float32) if self._pipeline is None else self._pipeline.mask(step)
        if size > count:
            rows = append_padding(rows, size)
            mask = append_padding({MASK: mask}, size)[MASK]
        prepared = add_mask(rows, mask)
        if not self._x64:
            check_integers(prepared)
        return prepared if self._sharding is None else put_batch(prepared, self._sharding)


def _check_batch(batch: Any) -> dict[str, np.ndarray]:
    if not isinstance(batch, Mapping) or not batch:
        raise TypeError(
            f"evaluate needs batches that are dicts of arrays, got {type(batch).__name__}"
        )
    rows = {name: np.asarray(value) for name, value in check_numbers(batch).items()}
    lengths = {name: array.shape[:1] for name, array in check_numbers(rows).items()}
    if len({*lengths.values()}) > 1 or () in lengths.values():
        found = ", ".join(f"{name} {array.shape}" for name, array in rows.items())
        raise ValueError(f"all entries of a batch need one first axis of examples, got {found}")
    return rows


def add_mask(
    rows: dict[str, np.ndarray], mask: np.ndarray | None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return a batch with its mask, and the weights of its examples."""
    if mask is None:
        mask = np.ones(len(next(iter(rows.values()))), np.float32)
    if MASK not in rows:
        return rows | {MASK: mask}, mask
    own = rows[MASK]
    return rows, np.where(mask == 0, 0, own).astype(np.float32) if own.ndim == 1 else mask
