"""Tests what `scripts/trace_product.py` reads from a trace."""

from scripts import trace_product


def noted(tid, pid, *scopes):
    """Makes both ends of scopes as Mosaic's profiler writes them, in microseconds of a thousand cycles each."""
    return [
        {"name": name, "ph": end, "ts": at, "pid": pid, "tid": tid}
        for name, *times in scopes
        for end, at in zip("BE", times, strict=True)
    ]


def test_a_trace_is_summed_by_scope_and_multiprocessor():
    first = noted(
        1,
        7,
        ("Init", 2.0, 2.2),
        ("load", 3.0, 5.0),
        ("decode", 5.0, 5.5),
        ("mma", 5.5, 6.0),
        ("load", 6.25, 6.5),
        ("decode", 6.5, 7.0),
        ("mma", 7.0, 8.0),
        ("store", 8.0, 8.125),
    )
    second = noted(2, 7, ("Init", 2.0, 2.2), ("load", 2.5, 5.0), ("store", 9.0, 9.5))
    # The profiler sorts by time, not by block.
    warpgroups = trace_product.scopes_of({"traceEvents": second + first})
    assert [multiprocessor for multiprocessor, _ in warpgroups] == [7, 7]
    alone = trace_product.summary(warpgroups[:1], per_block=1)
    expected = {
        "set up": 200,
        "fill": 800,
        "first tile": 3000,
        "waits": 250,
        "decode": 1000,
        "multiply": 1500,
        "between": 250,
        "store": 125,
        "all": 6125,
        "first end": 6125,
        "last end": 6125,
    }
    assert {name: round(cycles) for name, cycles in alone.items()} == expected
    both = trace_product.summary(warpgroups, per_block=2)
    assert round(both["fill"]) == 800, "that of the warpgroup which fills"
    assert (round(both["first end"]), round(both["last end"])) == (6125, 7500)
