"""Tests that the first process of several runs the tools of all. Whole runs: tests/test_several_hosts.py."""

import contextlib
import itertools
import threading

import pytest

from qerl_jax.config import ToolsConfig
from qerl_jax.distributed.hosts import HostLost
from qerl_jax.tools import shared_tools
from qerl_jax.tools.environments import Reply
from qerl_jax.tools.shared_tools import FarSession, SharedToolboxes
from tests.qerl_jax.distributed.test_hosts import Numbers, on_all, service  # noqa: F401
from tests.qerl_jax.tools import environments_for_tests as own

HERE = own.__name__
CFG = ToolsConfig((f"{HERE}:double",), f"{HERE}:Counter", seconds=5, workers=2)


@pytest.fixture
def together(service, monkeypatch):  # noqa: F811
    """Returns a function that calls work(hosts, boxes) in a thread per process, and closes the tools at the end."""
    monkeypatch.setattr(shared_tools, "_numbers", Numbers())

    def run(count, work, cfg=CFG, **given):
        everyone = threading.Barrier(count)

        def of_process(hosts):
            with contextlib.closing(SharedToolboxes(cfg, hosts=hosts, **given)) as boxes:
                try:
                    return work(hosts, boxes)
                finally:
                    everyone.wait(60)

        return on_all(count, of_process)

    run.service = service
    return run


def test_rows_of_all_processes_keep_states_apart_and_leave_nothing_behind(together):
    def work(hosts, boxes):
        found = []
        for start in (1, 5):
            row = boxes.session({"start": start + 10 * hosts.index, "prompt": "x"})
            found += [isinstance(row, FarSession)]
            found += [row.call("add", {"times": n}).text for n in (1, 2)]
            found += [row.call("double", {"x": 10**30}).text, row.finish().get_reward()]
            row.close()
        return found

    of_row = lambda far, n: [far, f"{n + 1}", f"{n + 3}", f"{2 * 10**30}", n + 3.0]
    expected = [of_row(i > 0, 1 + 10 * i) + of_row(i > 0, 5 + 10 * i) for i in range(3)]
    assert together(3, work) == expected
    assert together.service.values == {}


def test_errors_of_tools_are_replies_and_a_killed_row_gives_no_reward(together):
    def work(hosts, boxes):
        row = boxes.session({})
        wrong = row.call("add", {"wrong": 1})
        died = row.call("die", {})
        after = row.finish()
        row.close()
        return wrong.failed, "unexpected keyword" in wrong.text, died, vars(after)

    first, second = together(2, work)
    assert first == second
    assert second[:2] == (True, True) and "ended its process" in second[2].text
    assert second[3] == {"_class": "Counter"}


def test_functions_without_environment_need_no_end(together):
    def work(hosts, boxes):
        row = boxes.session({})
        return row.call("later", {"x": 3}), vars(row.finish())

    cfg = ToolsConfig((f"{HERE}:later",))
    assert together(2, work, cfg) == [(Reply("3"), {})] * 2


def test_an_object_of_a_script_keeps_one_state_for_all_processes(together):
    numbers = itertools.count(1)

    def remember(x: int) -> int:
        """Counts.

        Args:
            x: A number.
        """
        return next(numbers)

    def work(hosts, boxes):
        return {int(boxes.session({}).call("remember", {"x": 0}).text) for _ in range(3)}

    found = together(3, work, ToolsConfig(("a:b",)), tools=[remember])
    assert set.union(*found) == {*range(1, 10)}


def test_only_the_first_process_resets_environments_for_the_first_words(together):
    def work(hosts, boxes):
        if not hosts.leads:
            boxes.of = None
        return boxes.observations([{"start": 2}, {}])

    assert together(2, work) == [[" From 2.", None]] * 2


def test_a_row_that_is_abandoned_loses_its_process_in_the_first(together):
    def work(hosts, boxes):
        if hosts.leads:
            return hosts.gathered(None) and None
        row = boxes.session({})
        row.call("add", {"times": 3})
        row.abandon()
        row.abandon()
        # The first process takes requests in their order: the row of this one begins anew.
        again = row.call("add", {"times": 1}).text
        row.finish()
        hosts.gathered(None)
        return again

    assert together(2, work) == [None, "1"]


def test_an_error_that_is_not_a_tools_ends_all_processes_and_says_why(together, monkeypatch):
    failing = lambda *_: (_ for _ in ()).throw(OSError("no\nspace"))
    monkeypatch.setattr(shared_tools.Session, "call", failing)

    def work(hosts, boxes):
        if hosts.leads:
            return hosts.gathered(None)
        return boxes.session({}).call("add", {"times": 3})

    for each in together(2, work):
        assert isinstance(each, HostLost) and "process 0 of 2" in str(each)
        assert "ended by OSError: no space" in str(each)


def test_who_waits_for_a_reply_when_the_run_ends_waits_no_longer(together):
    def work(hosts, boxes):
        if not hosts.leads:
            threading.Timer(0.1, boxes.close).start()
            return boxes.reply("of a request that nobody has read")

    alone, lost = together(2, work)
    assert alone is None and isinstance(lost, HostLost) and "before a tool replied" in str(lost)


def test_one_process_serves_nobody():
    with (
        contextlib.closing(SharedToolboxes(CFG)) as boxes,
        contextlib.closing(boxes.session({"start": 4})) as row,
    ):
        assert not isinstance(row, FarSession) and row.call("add", {"times": 1}) == Reply("5")
        assert row.finish().get_reward() == 5 and boxes.observations([{}]) == [None]
