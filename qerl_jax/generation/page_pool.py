"""Which pages of a cache are taken, and by how many rows: plain numbers on the host."""

from collections.abc import Iterable, Sequence


class Pages:
    """The pages 1 ... N - 1 of a pool; page 0 is scratch and never handed out.

    A page that several rows share is free again when the last of them gives it back.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(
                f"num_pages: got {num_pages}; must be at least 2, for page 0 is scratch"
            )
        # Low numbers first: what is in use stays together.
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages that nobody holds, for one holder.

        Raises:
            ValueError: When fewer are free.
        """
        if count > self.free:
            raise ValueError(f"pages: asked for {count}; {self.free} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holder of each."""
        self._check_held(pages)
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One holder fewer of each."""
        pages = list(pages)
        self._check_held(pages)
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _check_held(self, pages: Iterable[int]) -> None:
        loose = [page for page in pages if not self._holders[page]]
        if loose:
            raise ValueError(f"pages: nobody holds {loose}")
