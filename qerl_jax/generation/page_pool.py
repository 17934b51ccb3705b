"""Tracks which pages of the KV cache are in use, and by how many rows: plain numbers on the host."""

import collections
from collections.abc import Sequence

from qerl_jax.system.checked import require


class Pages:
    """The pages 1 ... N - 1 of a pool; page 0 is scratch and never handed out.

    Pages are reference-counted: a page that several rows share is free again when the last of them gives it back.
    """

    def __init__(self, num_pages: int):
        require(num_pages >= 2, "num_pages", num_pages, "must be at least 2: page 0 is scratch")
        # Low numbers are taken first, so that used pages stay together.
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = collections.Counter()

    @property
    def free(self) -> int:
        """The number of pages that can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes free pages for one holder, and returns their numbers.

        Raises:
            ValueError: If fewer pages are free.
        """
        if count > self.free:
            raise ValueError(f"pages: asked for {count}; {self.free} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._holders.update(taken)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to each page; raises ValueError for a page that has none."""
        self._check_held(pages)
        self._holders.update(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Removes a holder from each page; raises ValueError for a page that has none."""
        self._check_held(pages)
        self._holders.subtract(pages)
        self._free += [page for page in pages if not self._holders[page]]

    def _check_held(self, pages: Sequence[int]) -> None:
        loose = [page for page in pages if not self._holders[page]]
        if loose:
            raise ValueError(f"pages: nobody holds {loose}")
