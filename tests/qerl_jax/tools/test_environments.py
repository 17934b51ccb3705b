"""Tests tools and environments: separate state for each row, limits, and errors that the policy is told."""

import collections
import contextlib
import json
import threading
import time

import pytest

from qerl_jax.config import ToolsConfig
from qerl_jax.rewards import sandbox
from qerl_jax.tools import environments, stock_tools
from qerl_jax.tools.environments import Session, Toolbox, Toolboxes
from tests.qerl_jax.tools import environments_for_tests as own

HERE = "tests.qerl_jax.tools.environments_for_tests"


@pytest.fixture(scope="module")
def toolbox():
    names = ((f"{HERE}:double", f"{HERE}:later"), f"{HERE}:Counter")
    cfg = ToolsConfig(*names, environment_options={"step": 10}, seconds=0.3)
    with contextlib.closing(Toolbox(cfg)) as made:
        yield made


@contextlib.contextmanager
def session(toolbox, **columns):
    several = isinstance(toolbox, Toolboxes)
    made = toolbox.session(columns) if several else Session(toolbox, columns)
    with contextlib.closing(made):
        yield made


def told(reply):
    assert reply.failed
    return json.loads(reply.text)["error"]


def test_the_policy_is_shown_functions_and_public_methods(toolbox):
    names = [shown["function"]["name"] for shown in toolbox.schemas]
    assert names == ["double", "later", "add", "die", "stall"]
    parameters = toolbox.schemas[2]["function"]["parameters"]
    assert list(parameters["properties"]) == ["times"]
    assert (toolbox.environment_name, toolbox.owns_reward) == ("Counter", True)
    assert toolbox.unimportable == []


def test_rows_have_states_of_their_own_and_processes_are_used_again(toolbox):
    with session(toolbox, start=1) as first, session(toolbox, start=5) as second:
        assert first.call("add", {"times": 2}).text == "21"
        assert second.call("add", {"times": 1}).text == "15"
        assert first.call("double", {"x": 4}).text == "8"
        assert first.call("later", {"x": 4}).text == "4"
        seen = {"step": 10, "count": 21, "_reward": 21.0, "_class": "Counter"}
        assert vars(first.finish()) == seen
        assert second.finish().get_reward() == 15
    processes = len(toolbox._all)
    with session(toolbox, start=7) as third:
        assert third.finish().count == 7  # without a call, too
    assert len(toolbox._all) == processes == 2


def test_errors_are_told_and_leave_the_state_as_it_is(toolbox):
    with session(toolbox) as row:
        assert "unexpected keyword argument 'n'" in told(row.call("add", {"n": 1}))
        assert "there is no tool '_own'; there are double" in told(row.call("_own", {}))
        assert "there is no tool 'reset'" in told(row.call("reset", {"start": 9}))
        assert row.call("add", {"times": 1}) == environments.Reply("10")


@pytest.mark.parametrize(
    ("name", "why"), [("stall", "took too long and was stopped"), ("die", "ended its process")]
)
def test_a_call_that_hangs_or_dies_ends_its_own_environment_alone(toolbox, name, why):
    with session(toolbox, start=3) as bad, session(toolbox, start=4) as good:
        good.call("add", {"times": 1})
        assert told(bad.call(name, {})) == f"{name} {why}"
        assert "the environment has ended" in told(bad.call("add", {"times": 1}))
        assert bad.finish().get_reward() is None
        assert vars(bad.finish()) == {"_class": "Counter"}
        assert good.call("add", {"times": 1}).text == "24"
    with session(toolbox, start=3) as fresh:  # in the process that took the killed one's place
        assert fresh.call("add", {"times": 1}).text == "13"


def test_an_environment_says_how_a_row_begins_or_why_it_cannot(toolbox):
    assert toolbox.observation({"start": 2, "prompt": "x"}) == " From 2."
    assert toolbox.observation({}) is None
    with pytest.raises(ValueError, match=r"Counter: reset\(start\) raised ValueError: start must"):
        toolbox.observation({"start": -1})
    with session(toolbox, start=-1) as row:
        assert "could not begin: it raised ValueError" in told(row.call("add", {"times": 1}))
        assert row.finish().get_reward() is None


@pytest.mark.slow
def test_plain_functions_go_on_after_a_call_that_hung():
    toolbox = Toolbox(ToolsConfig(seconds=0.2, functions=(f"{HERE}:double", f"{HERE}:hang")))
    with contextlib.closing(toolbox), session(toolbox) as row, session(toolbox) as other:
        assert told(row.call("hang", {})) == "hang took too long and was stopped"
        assert row.call("double", {"x": 2}).text == "4"
        assert other.call("double", {"x": 3}).text == "6"
        assert len(toolbox._all) == 1  # rows that call nothing hold no process
        assert vars(row.finish()) == {} and toolbox.observation({}) is None


def test_what_no_other_process_can_import_runs_in_this_one():
    def triple(x: int) -> int:
        """Triples.

        Args:
            x: A number.
        """
        return 3 * x

    class Local(own.WithoutReward):
        """An environment of a notebook."""

        seen = collections.OrderedDict(row=(1, 2))

        def __init__(self):
            self.seen_by_rows = self.seen

    toolbox = Toolbox(ToolsConfig(seconds=0.2, functions=("a:b",)), [triple, own.hang], Local)
    assert toolbox.unimportable == ["triple", "Local"] and not toolbox.owns_reward
    with contextlib.closing(toolbox), session(toolbox) as row:
        assert row.call("triple", {"x": 2}).text == "6"
        assert row.call("wait", {}).text == "waited"
        after = row.finish()
        # As from a process of its own: plain values, which a later row cannot change.
        Local.seen["row"] = None
        assert after.get_reward() is None and after.seen_by_rows == {"row": [1, 2]}
        assert type(after.seen_by_rows) is dict
        assert "took too long" in told(row.call("hang", {}))


@pytest.mark.parametrize("is_local", [False, True])
def test_an_environment_keeps_its_event_loop_between_calls(is_local):
    class Local(own.Remote):
        """No other process can import it."""

    cfg = ToolsConfig(environment=f"{HERE}:Remote")
    toolbox = Toolbox(cfg, environment=Local if is_local else None)
    assert bool(toolbox.unimportable) is is_local
    with contextlib.closing(toolbox), session(toolbox) as row:
        assert row.call("ask", {}).text == row.call("ask", {}).text == "connected"


@pytest.mark.parametrize("error", [TimeoutError, SystemExit])
def test_what_a_call_in_this_process_raises_is_told_and_ends_nothing(error):
    class Local(own.WithoutReward):
        """An environment of a notebook, which asks a service."""

        def ask(self) -> str:
            """Asks."""
            raise error("no answer")

    toolbox = Toolbox(ToolsConfig(functions=("a:b",)), [], Local)
    with contextlib.closing(toolbox), session(toolbox) as row:
        assert told(row.call("ask", {})) == f"{error.__name__}: no answer"
        assert row.call("wait", {}).text == "waited"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"functions": ("abacus",)}, r"must be one of \['calculator', 'python'\], or an import"),
        ({"functions": (f"{HERE}:nothing",)}, "could not import .*nothing'"),
        ({"functions": ("__main__:weather",)}, "defined in a script, a notebook or a function"),
        ({"environment": "chess"}, r"must be one of \['guess_number'\]"),
        ({"environment": "builtins:dict"}, "must have a method reset"),
        ({"environment": f"{HERE}:double"}, "double: cannot be made: .*argument: 'x'"),
        ({"functions": (f"{HERE}:double", f"{HERE}:double")}, "double.*must differ in name"),
    ],
)
def test_what_cannot_be_used_is_named(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Toolbox(ToolsConfig(**options))


@pytest.fixture(scope="module")
def several():
    names = dict.fromkeys(("count", "tens"), f"{HERE}:Counter") | {"game": "guess_number"}
    options = {"tens": {"step": 10}, "game": {"high": 50}}
    fields = {"environments": names, "environment_options": options}
    cfg = ToolsConfig((f"{HERE}:double",), **fields, seconds=0.5)
    with contextlib.closing(Toolboxes(cfg)) as made:
        yield made


def test_each_row_has_the_tools_of_the_environment_that_it_names(several):
    names = lambda box: [shown["function"]["name"] for shown in box.schemas]
    assert names(several.of({"environment": "tens"})) == ["double", "add", "die", "stall"]
    assert names(several.of({"environment": "game"})) == ["double", "guess"]
    with session(several, environment="tens", start=1) as tens:
        assert tens.call("add", {"times": 2}).text == "21"
        assert "there is no tool 'guess'" in told(tens.call("guess", {"number": 1}))
        tens = tens.finish()
    with session(several, environment="count", start=1) as count:
        assert count.call("add", {"times": 2}).text == "3"
    assert "from 1 to 50" in several.observations([{"environment": "game", "secret": 7}])[0]
    with session(several, environment="game", secret=7) as game:
        assert game.call("guess", {"number": 7}).text == "correct"
        game = game.finish()
    rewards = {name: own(environments=[tens, game]) for name, own in several.own_rewards()}
    assert rewards == {"Counter": [21.0, None], "GuessNumber": [None, 1.0]}


def test_an_environment_of_several_is_not_told_its_name_and_one_alone_is(several):
    def told_by(boxes):
        row = {"environment": "seen", "x": 1}
        with contextlib.closing(Toolboxes(ToolsConfig(("a:b",)), [own.double], boxes)) as made:
            return json.loads(made.observations([row])[0])

    assert told_by({"seen": own.Listening}) == ["x"]
    assert told_by(own.Listening) == ["environment", "x"]


def test_a_row_that_names_no_environment_and_two_classes_of_one_name_are_refused(several):
    for row in ({}, {"environment": "chess"}, {"environment": ["game"]}):
        with pytest.raises(ValueError, match="environment: got .* must name one of .*: count, t"):
            several.of(row)
    other = type("Counter", (own.Counter,), {})
    with pytest.raises(ValueError, match="Counter.*must differ in name"):
        Toolboxes(ToolsConfig(("calculator",)), environment={"a": own.Counter, "b": other})


def test_the_calculator_computes_and_nothing_else():
    values = {"(5-3)*12": "24", "7/2": "3.5", "6/2": "3", "-7//2": "-4", " 10 % 4": "2"}
    assert {text: stock_tools.calculator(text) for text in values} == values
    for expression in ("2**9", "x", "f(1)", "True+1", "1 if 1 else 2", "1e300*10"):
        with pytest.raises(ValueError):
            stock_tools.calculator(expression)


@pytest.mark.skipif(sandbox.unavailable() is not None, reason="programs cannot be isolated here")
def test_python_runs_in_the_sandbox():
    assert stock_tools.python("print(6 * 7)") == "42"
    assert "ZeroDivisionError" in stock_tools.python("1 / 0")
    assert stock_tools.python("x = 1") == "(no output)"
    assert "\n...\n" in stock_tools.python("print('a' * 10**6)")


def test_a_number_is_guessed_in_several_turns():
    game = stock_tools.GuessNumber(high=100, most_guesses=8)
    assert "from 1 to 100" in game.reset(secret=37, prompt="play")
    assert [game.guess(n) for n in (50, 25, 37)] == ["lower", "higher", "correct"]
    assert game.get_reward() == 1.0 and (game.guesses, game.found) == (3, True)
    with pytest.raises(ValueError, match="the game is over"):
        game.guess(1)
    game.reset(answer="99")
    for number in range(1, 8):
        game.guess(number)
    assert game.get_reward() == 0.0
    game.guess(99)
    assert game.get_reward() == 0.75  # one guess more than halving needs
    with pytest.raises(ValueError, match=r"secret: got 101; must be in 1 \.\.\. 100"):
        game.reset(secret=101)


def test_a_row_that_calls_after_the_tools_were_closed_starts_no_process():
    """As in a thread that was about to call when the run ended."""
    made = Toolbox(ToolsConfig((f"{HERE}:double",), seconds=0.3))
    row = Session(made, {})
    made.close()
    assert told(row.call("double", {"x": 4})) == "double ended its process"
    (runner,) = made._all
    assert runner._worker._process is None


def test_a_row_that_is_abandoned_within_a_call_leaves_its_process_to_no_other_row():
    cfg = ToolsConfig(environment=f"{HERE}:Counter", seconds=5.0)
    with contextlib.closing(Toolbox(cfg)) as made:
        first = Session(made, {})
        first.begin()

        def call_and_close():
            with contextlib.closing(first):
                first.call("stall", {})

        calling = threading.Thread(target=call_and_close)
        calling.start()
        time.sleep(0.3)
        first.abandon()
        calling.join(20)
        with session(made) as second:
            assert second.call("add", {"times": 1}).text == "1"
