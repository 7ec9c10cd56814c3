"""Reading the leaves of a checkpoint: ahead of their use, and verified on the way."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ftrain.checkpoints.casting import cast
from ftrain.checkpoints.digests import digest_of
from ftrain.checkpoints.errors import DamagedError, in_one_line
from ftrain.checkpoints.layout import leaf_specs, open_leaves
from ftrain.checkpoints.manifest import Leaf, Manifest, place_of
from ftrain.checkpoints.matching import describe
from ftrain.checkpoints.snapshot import Index
from ftrain.checkpoints.verifying import is_as_saved, wrong_sums
from ftrain.storage import raise_if_transient

LARGE = 1 << 20  # bytes from which on a file is verified through the values in it
AHEAD = 1 << 28  # bytes that are being read while what came before them is verified and used

Use = Callable[[str, np.ndarray], Any]  # what becomes of a leaf, by its name and value


class Reading:
    """Leaves of one checkpoint. Whatever is wrong with them is collected, and told at the end, all at once.

    One thread goes through the leaves, and tensorstore's own read the next ones meanwhile: several threads of Python
    would only take turns. What is read is verified by the digests of the leaves, so that the large files, which hold
    nothing but values, are not read once more for their checksums, unless that is to tell which of them is damaged.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest | None,
        names: Iterable[str],
        *,
        verify: bool = True,
    ):
        self._directory, self._manifest, self._verify = (
            directory,
            manifest,
            verify and manifest is not None,
        )
        self._leaves: Mapping[str, Leaf] = manifest.leaves if manifest else {}
        self._wrong: list[str] = []
        self._checker, self._checking = ThreadPoolExecutor(1), deque[Future[None]]()
        specs = leaf_specs(directory)
        self.stored = open_leaves(directory, specs, [name for name in names if name in specs])

    def whole(self, names: Iterable[str], use: Use) -> dict[str, Any]:
        """What `use` makes of each leaf."""
        used: dict[str, Any] = {}
        for name, read in self._ahead([name for name in names if self._is_as_described(name)]):
            try:
                value = read()
            except ValueError as error:
                raise_if_transient(error, self._directory)
                self._wrong.append(f"leaf {name} cannot be read: {in_one_line(error)}")
                continue
            if self._verify:
                self._check_value(name, value)
            used[name] = use(name, value)
        return used

    def _check_value(self, name: str, value: np.ndarray) -> None:
        """Whether a leaf is as it was saved; of a large one that is found out beside the rest of the work."""

        def check() -> None:
            if not is_as_saved(value, self._leaves[name]):
                self._wrong.append(f"leaf {name} has other values than were saved")

        if value.nbytes < LARGE:
            check()
            return
        while len(self._checking) > 3:  # or values would be kept that are not needed any more
            self._checking.popleft().result()
        self._checking.append(self._checker.submit(check))

    def pieces(self, name: str, sharding: Any, dtype: Any) -> Any:
        """A leaf that is spread over processes: each reads its own pieces, and verifies those that were digested."""
        stored, digests = self.stored[name], self._leaves[name].pieces if self._verify else {}

        def read(index: Index | None) -> np.ndarray:
            try:
                value = stored.read(index or ())
            except ValueError as error:
                raise_if_transient(error, self._directory)
                raise DamagedError(
                    self._directory, [f"leaf {name} cannot be read: {in_one_line(error)}"]
                ) from error
            wanted = digests.get(place_of(index or (), stored.shape))
            if wanted is not None and digest_of(value) != wanted:
                self._wrong.append(f"leaf {name} has other values than were saved")
            return cast(value, dtype, name)

        return (
            jax.make_array_from_callback(stored.shape, sharding, read)
            if self._is_as_described(name)
            else None
        )

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """At the end, all that is wrong, with files and with leaves, is one error."""
        self._checker.shutdown()
        if kind is None:
            for check in self._checking:
                check.result()
            self._tell()

    def _tell(self) -> None:
        wrong: list[str] = []
        if self._verify and self._manifest:
            # Of several processes each reads only its pieces, but all must come to the same conclusion.
            every_file = bool(self._wrong) or jax.process_count() > 1
            wrong = wrong_sums(
                self._directory, self._manifest, None if every_file else range(LARGE)
            )
        if wrong or self._wrong:
            raise DamagedError(self._directory, wrong + self._wrong)

    def _is_as_described(self, name: str) -> bool:
        found, wanted = (
            describe(self.stored[name]),
            describe(self._leaves.get(name, self.stored[name])),
        )
        if found != wanted:
            self._wrong.append(f"leaf {name} is {found}, expected {wanted}")
        return found == wanted

    def _ahead(self, names: Iterable[str]) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        under_way: deque[tuple[str, Any, int]] = deque()
        total = 0
        for name in names:
            stored = self.stored[name]
            try:
                future = stored.start_reading()
            except ValueError as error:
                self._wrong.append(f"leaf {name} cannot be read: {in_one_line(error)}")
                continue
            under_way.append((name, future, stored.bytes))
            total += stored.bytes
            while total > AHEAD and len(under_way) > 1:
                ready, future, size = under_way.popleft()
                total -= size
                yield ready, future.result
        for ready, future, _ in under_way:
            yield ready, future.result
