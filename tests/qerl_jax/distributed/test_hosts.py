"""Tests what the processes of a run tell each other. Runs on two processes: tests/test_several_hosts.py."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from qerl_jax.distributed import hosts
from qerl_jax.distributed.hosts import HostLost, Hosts
from qerl_jax.system.checked import ConfigError
from qerl_jax.tracking.logger import Logger, Unheard
from qerl_jax.training.stopping import Stop, Stopped

PLAIN = {"COORDINATOR_ADDRESS": "node0:1234", "NUM_PROCESSES": "4", "PROCESS_ID": "3"}
PLAIN = {f"JAX_{name}": value for name, value in PLAIN.items()}
SLURM = {"JOB_ID": "7", "STEP_NODELIST": "node[0-3]", "NTASKS": "4", "PROCID": "3", "LOCALID": "0"}
SLURM = {f"SLURM_{name}": value for name, value in (SLURM | {"STEP_NUM_NODES": "4"}).items()}


class Service:
    """Stands in for JAX's coordination service, with threads instead of processes."""

    def __init__(self):
        self.values = {}

    def key_value_set_bytes(self, key, value):
        self.values[key] = value

    def key_value_set(self, key, value):
        if key in self.values:
            raise RuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def key_value_try_get(self, key):
        if key not in self.values:
            raise RuntimeError("NOT_FOUND")
        return self.values[key]

    def blocking_key_value_get_bytes(self, key, milliseconds):
        until = time.monotonic() + milliseconds / 1000
        while time.monotonic() < until:
            if key in self.values:
                return self.values[key]
            time.sleep(0.001)
        raise RuntimeError("DEADLINE_EXCEEDED: timed out")

    def key_value_delete(self, key):
        """Deletes what lies under the key, too, as JAX's service does."""
        del self.values[key]
        for below in [each for each in self.values if each.startswith(f"{key}/")]:
            del self.values[below]


class Numbers(threading.local):
    """Each thread counts its own messages, as a process does."""

    def __init__(self):
        self.count = itertools.count()

    def __next__(self):
        return next(self.count)


@pytest.fixture
def service(monkeypatch):
    service = Service()
    monkeypatch.setattr(hosts, "_service", lambda: service)
    monkeypatch.setattr(hosts, "_numbers", Numbers())
    monkeypatch.setattr(hosts, "_LOOK", 20)
    return service


def on_all(count, work):
    """Calls work(hosts) in a thread for each process, and returns its results or errors."""
    with ThreadPoolExecutor(count) as threads:
        done = [threads.submit(work, Hosts(index, count)) for index in range(count)]
        return [each.exception() or each.result() for each in done]


def test_alone_nothing_is_sent():
    alone = Hosts.all()
    assert alone == Hosts() and alone.leads
    assert alone.gathered(3) == [3] and alone.told(lambda: 4) == 4
    alone.ask(15)
    assert alone.asked() is None
    hosts.leave(2)


def test_all_get_what_each_gives_in_order(service):
    def work(own):
        first = own.gathered({"index": own.index})
        return first, own.told(lambda: own.index), own.gathered(own.index**2)

    expected = [{"index": n} for n in range(3)], 0, [0, 1, 4]
    assert on_all(3, work) == [expected] * 3
    # Of what was said only the last is kept.
    assert sorted(service.values) == ["qerl/2/0", "qerl/2/1", "qerl/2/2"]


def test_a_long_message_is_sent_in_pieces_that_each_arrive_in_time(service, monkeypatch):
    """A message that takes longer than one look for it would never arrive."""
    monkeypatch.setattr(hosts, "_PIECE", 16)
    text, sizes, write = "rows " * 100, [], service.key_value_set_bytes

    def noted(key, value):
        sizes.append(len(value))
        write(key, value)

    monkeypatch.setattr(service, "key_value_set_bytes", noted)
    said = lambda own: [own.gathered(text[: 7 * (own.index + n)]) for n in range(3)]
    expected = [[text[: 7 * (index + n)] for index in range(2)] for n in range(3)]
    assert on_all(2, said) == [expected] * 2
    assert max(sizes) == 16 + hosts._NUMBER_BYTES and len(sizes) > 6
    assert {key.split("/")[1] for key in service.values} == {"2"}
    sent = lambda own: own.received("a") if own.leads else own.send("a", text)
    before = dict(service.values)
    assert on_all(2, sent) == [(text,), None]
    assert service.values == before


def test_an_error_in_one_process_ends_those_that_wait_for_it_and_says_why(service):
    def work(own):
        with own.farewell():
            own.gathered(None)
            if own.index == 1:
                raise ValueError("no\nmore space")
            return own.gathered(None)

    lost, failed, other = on_all(3, work)
    assert isinstance(failed, ValueError)
    for each in (lost, other):
        assert isinstance(each, HostLost) and each.exit_code == 4
        assert "process 1 of 3" in str(each) and "ended by ValueError: no more space" in str(each)


def test_one_process_receives_what_another_sends_once_or_waits_no_longer(service):
    def work(own):
        if own.leads:
            return own.received("a"), own.received("b", lambda: True)
        return own.send("a", None)

    assert on_all(2, work) == [((None,), None), None]
    assert service.values == {}


def test_a_process_whose_service_is_gone_says_so(service, monkeypatch):
    gone = mock.Mock(side_effect=RuntimeError("UNAVAILABLE: Socket closed\nmore"))
    monkeypatch.setattr(service, "blocking_key_value_get_bytes", gone)
    message = "the first process of the run cannot be reached: UNAVAILABLE: Socket closed"
    errors = on_all(2, lambda own: own.gathered(1))
    assert [str(error) for error in errors] == [message] * 2


def test_a_signal_to_one_process_ends_all_at_the_same_place(service):
    def work(own):
        stop = Stop(own)
        stop.poll_together()
        if own.index == 1:
            stop.signal = 15
        stop.poll_together()

    assert [stopped.exit_code for stopped in on_all(2, work)] == [143, 143]


def test_where_a_signal_ends_the_work_of_one_process_all_end_theirs(service):
    def work(own):
        stop = Stop(own)
        assert own.together(lambda: own.index, stop.poll) == [0, 1, 2]

        def interrupted():
            stop.signal = 15 if own.index == 1 else None
            if stop.signal:
                stop.poll()

        return own.together(interrupted, stop.poll)

    assert [stopped.exit_code for stopped in on_all(3, work)] == [143] * 3


def test_a_signal_to_one_process_ends_the_sampling_of_others(service):
    first, second = Stop(Hosts(0, 2)), Stop(Hosts(1, 2))
    first.poll()
    second.signal = 2
    for each in (second, first):
        with pytest.raises(Stopped) as stopped:
            each.poll()
        assert stopped.value.exit_code == 130


def test_plain_variables_name_the_processes():
    assert hosts._named({}) is None
    three_of_four = {"num_processes": 4, "process_id": 3, "local_device_ids": []}
    assert hosts._named(PLAIN) == {"coordinator_address": "node0:1234"} | three_of_four
    assert "local_device_ids" not in hosts._named(PLAIN | {"JAX_LOCAL_DEVICE_IDS": "0,1"})
    assert hosts._named(PLAIN | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None
    # They come before Slurm's.
    assert hosts._named(SLURM | PLAIN) == hosts._named(PLAIN)


def test_a_step_of_slurm_with_a_task_for_each_host_sees_all_its_cards():
    assert hosts._named(SLURM) == {"local_device_ids": []}
    assert hosts._named(SLURM | {"SLURM_NTASKS": "32"}) == {}
    assert hosts._named(SLURM | {"SLURM_NTASKS": "1"}) is None
    # A batch script is no step.
    assert hosts._named({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID: got ''; must be set together with"),
        ({"JAX_PROCESS_ID": "4"}, r"JAX_PROCESS_ID: got 4; must be from 0 to .* = 3"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES: got 'two'; must be a whole number"),
        ({"JAX_COORDINATOR_ADDRESS": "node0"}, "must be HOST:PORT of the first process"),
    ],
)
def test_variables_that_are_wrong_are_named(changed, message):
    with pytest.raises(ConfigError, match=message):
        hosts._named(PLAIN | changed)


def test_a_process_that_is_not_heard_can_be_told_all_that_a_log_is(tmp_path):
    logger = Logger(tmp_path, total_steps=1, quiet=True)
    assert {name for name in dir(logger) if not name.startswith("_")} <= set(dir(Unheard))
    logger.close()
    Unheard().write(1, {"reward": 0.5})
