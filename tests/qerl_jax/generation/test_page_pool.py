"""Tests which pages are free, and which rows hold the others."""

import pytest

from qerl_jax.generation.page_pool import Pages


def test_page_0_is_never_handed_out_and_every_other_once():
    pages = Pages(6)
    taken = pages.take(2) + pages.take(3)
    assert sorted(taken) == [1, 2, 3, 4, 5] and pages.free == 0


def test_a_shared_page_is_free_when_its_last_holder_gives_it_back():
    pages = Pages(3)
    shared = pages.take(1)
    pages.share(shared)
    pages.give_back(shared)
    assert pages.free == 1
    pages.give_back(shared)
    assert pages.free == 2 and sorted(pages.take(2)) == [1, 2]


def test_misuse_is_an_error_and_changes_nothing():
    pages = Pages(3)
    (page,) = pages.take(1)
    with pytest.raises(ValueError, match="asked for 2; 1 are free"):
        pages.take(2)
    for use in (pages.share, pages.give_back):
        with pytest.raises(ValueError, match=rf"nobody holds \[{3 - page}\]"):
            use([page, 3 - page])
    assert pages.free == 1
    with pytest.raises(ValueError, match="num_pages: got 1"):
        Pages(1)
