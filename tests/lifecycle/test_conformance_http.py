"""What every operation does in every state of a model, once more over sockets with the real model.

Nothing here can be held with a gate. What holds a state is real: streams that nobody ends before the test does, and a
model with many slots, which takes a while to load and to free. What the server does is seen on its status page.
"""

from __future__ import annotations

import itertools
import re
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from trioserve.config.model_files import embedded_model_path

from .client import COMPLETIONS, RawClient, exactly, http, wait_idle
from .daemon import Daemon, eventually, well_behaved

LOAD, UNLOAD = "/v1/models/load", "/v1/models/unload"
UNLOAD_MANY, UNLOAD_ALL = "/v1/tasks/unload_models", "/v1/tasks/unload_all_models"
ENDLESS = 400  # tokens: seconds of work, far more than a test lets them have
TOKENS = 3
MOST_CONTEXT = 1024
PATIENCE = 60  # seconds; only a hang meets it
ATTEMPTS = 20  # to meet a moment that lasts some hundredths of a second
CONFIG = """
management = true
max_loaded_models = {limit}
[[models]]
id = "m"
path = "{path}"
n_ctx = 512
slots = 2
lazy = true
[[models]]
id = "wide"
path = "{path}"
n_ctx = 2048
slots = 16
lazy = true
[[models]]
id = "other"
path = "{path}"
n_ctx = 512
lazy = true
"""


@dataclass
class Told:
    """A response."""

    status: int
    body: dict

    @property
    def text(self):
        return self.body["choices"][0]["text"]


class Stage:
    """A server, whoever is at work there, and what they were told.

    Arguments:
        daemon: the server.
        under_test: id of the model that operations are about.
    """

    contexts = itertools.count(MOST_CONTEXT, -1)

    def __init__(self, daemon: Daemon, under_test: str = "m") -> None:
        self.daemon = daemon
        self.id = under_test
        self.results: dict[str, Future[Told]] = {}
        self._stack = ExitStack()

    def __enter__(self):
        self.client = self._stack.enter_context(http(self.daemon.url))
        self._threads = self._stack.enter_context(ThreadPoolExecutor(16))
        self._holders = self._stack.enter_context(ExitStack())
        self._first_line = len(self.daemon.log_text().splitlines())
        return self

    def __exit__(self, *error):
        self._stack.__exit__(*error)

    # -- operations

    def infer(self, name="infer", wait=None, model=None):
        body = exactly(TOKENS, model=model or self.id, busy_timeout_ms=wait)
        return self.post(COMPLETIONS, body, **{"x-request-id": name})

    def load(self, name="load", wait=None):
        """Reconfigure: the context of each slot is by one token smaller each time."""
        self.context = next(self.contexts)
        return self.post(LOAD, {"id": self.id, "n_ctx": self.context, "busy_timeout_ms": wait})

    def unload(self, name="unload", wait=None):
        return self.post(UNLOAD, {"id": self.id, "busy_timeout_ms": wait})

    def unload_many(self, name="unload_many", wait=None, ids=None):
        ids = ids or [self.id, "other", self.id, "nobody"]
        return self.post(UNLOAD_MANY, {"model_ids": ids, "busy_timeout_ms": wait})

    def unload_all(self, name="unload_all", wait=None):
        return self.post(UNLOAD_ALL, {"busy_timeout_ms": wait})

    def infer_other(self, name="other", wait=None):
        return self.infer(name, wait, model="other")

    def post(self, route, body, **headers):
        response = self.client.post(route, json=body, headers=headers)
        return Told(response.status_code, response.json())

    def start(self, name, operation, *args):
        """Let an operation go its way."""
        self.results[name] = self._threads.submit(operation, name, *args)

    def result(self, name):
        return self.results[name].result(PATIENCE)

    def done(self, name):
        return self.results[name].done()

    # -- what there is to see

    def model(self, model_id=None):
        return self.client.get(f"/v1/models/{model_id or self.id}").json()

    def state(self, model_id=None):
        return self.model(model_id)["state"]

    def waiting(self, count):
        """Return once so many requests and operations wait for the model."""

        def there():
            now = self.model()
            return now["queued_requests"] + now["queued_operations"] == count

        eventually(there, PATIENCE, f"{count} that wait")

    def history(self):
        """Operations that have ended since the beginning of the test, in that order, from the log."""
        lines = self.daemon.log_text().splitlines()[self._first_line :]
        names = [_name_in(line) for line in lines if " info request " in line]
        return [name for name in names if re.match(r"\d-|load|unload", name)]

    # -- holding slots

    def hold(self, slots=1):
        """Take slots with streams that go on until ``let_go``."""
        for _ in range(slots):
            raw = self._holders.enter_context(RawClient(self.daemon.port))
            raw.post(exactly(ENDLESS, model=self.id, stream=True))
            raw.read_events(1)

    def let_go(self):
        self._holders.close()

    def settle(self):
        """Let everything end that is under way."""
        self.let_go()
        for name in self.results:
            self.result(name)
        wait_idle(self.client, PATIENCE)


def _name_in(line):
    """What a line of the log is about: an operation by its kind, a request by its id."""
    fields = dict(pair.partition("=")[::2] for pair in line.split() if "=" in pair)
    return fields.get("operation") or fields["request_id"]


def serve(tmp_path_factory, limit):
    file = tmp_path_factory.mktemp("conformance") / "models.toml"
    file.write_text(CONFIG.format(path=embedded_model_path(), limit=limit))
    return well_behaved("--config", str(file))


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """A server that may hold all its models."""
    with serve(tmp_path_factory, 0) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A server that may hold one model at a time."""
    with serve(tmp_path_factory, 1) as daemon:
        yield daemon


@pytest.fixture
def stage(roomy):
    with Stage(roomy) as stage:
        yield stage
        stage.settle()


@pytest.fixture
def wide(roomy):
    with Stage(roomy, "wide") as stage:
        yield stage
        stage.settle()


# -- bringing the model into a state


def unloaded(stage):
    assert stage.unload().status == 200
    assert stage.state() == "unloaded"


def loading(stage):
    unloaded(stage)
    stage.start("first", stage.infer)
    meet(stage, "loading")


def idle(stage):
    assert stage.infer().status == 200
    wait_idle(stage.client)
    assert stage.state() == "ready"


def busy(stage):
    idle(stage)
    stage.hold(stage.model()["slots"])
    assert (stage.state(), stage.model()["active_slots"]) == ("ready", 2)


def reconfiguring(stage):
    idle(stage)
    stage.start("first", stage.load)
    meet(stage, "reconfiguring")


def unloading(stage):
    idle(stage)
    stage.start("first", stage.unload)
    meet(stage, "unloading")


class MissedError(Exception):
    """A short moment had passed before it was seen."""


def meet(stage, state):
    """Return as soon as the model is seen in a state that lasts for a moment only.

    Raises:
        MissedError: what brings it about has ended, and it was not seen.
    """
    while stage.state() != state:
        if stage.done("first"):
            raise MissedError


# -- what came of an operation


def answered(stage, told):
    return (told.status, told.body.get("usage", {}).get("completion_tokens")) == (200, TOKENS)


def configured(stage, told):
    return (told.status, told.body.get("state")) == (200, "ready") and stage.model()["n_ctx"] == stage.context


def gone(stage, told):
    return told.status == 200 and told.body["id"] == stage.id and not told.body["loaded"]


def two_gone(stage, told):
    return told == Told(200, {"unloaded": [stage.id, "other"], "not_found": ["nobody"]})


def all_gone(stage, told):
    return told == Told(200, {"unloaded": ["m", "wide", "other"]})


READY, UNLOADED = "ready", "unloaded"
OPERATIONS = {  # what comes of each, and the model's state after it
    "infer": (answered, READY),
    "load": (configured, READY),
    "unload": (gone, UNLOADED),
    "unload_many": (two_gone, UNLOADED),
    "unload_all": (all_gone, UNLOADED),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("state", [unloaded, idle], ids=lambda state: state.__name__)
def test_operation_at_rest(stage, state, operation):
    state(stage)
    came_of_it, after = OPERATIONS[operation]
    told = getattr(stage, operation)()
    assert came_of_it(stage, told), told
    assert stage.state() == after


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_on_a_busy_model_waits(stage, operation):
    busy(stage)
    stage.start("operation", getattr(stage, operation))
    stage.waiting(1)
    assert not stage.done("operation")
    stage.let_go()
    came_of_it, after = OPERATIONS[operation]
    assert came_of_it(stage, stage.result("operation")), stage.result("operation")
    assert stage.state() == after


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("state", [loading, reconfiguring, unloading], ids=lambda state: state.__name__)
def test_operation_on_a_model_in_transition_waits(wide, state, operation):
    came_of_it, after = OPERATIONS[operation]
    if state is loading and operation == "infer":
        seen = {"active_slots": 2}
    else:
        seen = {"queued_requests" if operation == "infer" else "queued_operations": 1}
    for _ in range(ATTEMPTS):
        wide.results.clear()
        if arrives_during(wide, state, operation, seen):
            break
    else:
        pytest.fail(f"in {ATTEMPTS} attempts the operation never arrived in time")
    told = wide.result("operation")
    assert came_of_it(wide, told), told
    assert wide.result("first").status == 200
    wait_idle(wide.client)
    assert wide.state() == after


def arrives_during(stage, state, operation, seen):
    """Whether an operation was seen to wait while the transition went on; all of it has ended where it was not."""
    try:
        state(stage)
        stage.start("operation", getattr(stage, operation))
        while not stage.done("operation"):
            now = stage.model()
            if seen.items() <= now.items() and now["state"] not in (READY, UNLOADED):
                return True
    except MissedError:
        pass
    stage.settle()
    return False


# -- no waiting at all


def test_who_may_not_wait_is_turned_away_by_a_busy_model_at_once(stage):
    busy(stage)
    before = stage.client.get("/v1/models").json()
    for operation in OPERATIONS:
        told = getattr(stage, operation)(wait=0)
        assert (told.status, told.body["error"]["type"]) == (503, "server_busy"), operation
        assert stage.client.get("/v1/models").json() == before, f"{operation} left a trace"


# -- orders of arrival, at a model whose slots are all taken

ORDERS = [
    ("infer", "unload"),
    ("unload", "infer"),
    ("load", "unload"),
    ("unload", "load"),
    ("unload", "unload"),
    ("infer", "load", "infer", "unload", "infer"),
    ("unload_all", "infer", "unload_all"),
    ("unload_many", "unload", "infer"),
]


@pytest.mark.parametrize("order", ORDERS, ids=["-".join(order) for order in ORDERS])
def test_operations_run_in_the_order_of_their_arrival(stage, order):
    busy(stage)
    arrive(stage, *order)
    before = len(stage.history())
    stage.let_go()
    results = [stage.result(f"{place}-{operation}") for place, operation in enumerate(order)]
    assert {told.status for told in results} == {200}
    expected = [as_logged(place, operation) for place, operation in enumerate(order)]
    eventually(lambda: len(stage.history()) == before + len(expected), what="a line of the log for each")
    assert stage.history()[before:] == expected


def arrive(stage, *operations):
    """Let operations arrive one after another, each named by its place and what it is."""
    for place, operation in enumerate(operations):
        stage.start(f"{place}-{operation}", getattr(stage, operation))
        stage.waiting(place + 1)


def as_logged(place, operation):
    return f"{place}-infer" if operation == "infer" else operation.partition("_")[0]


def test_what_was_queued_sees_the_new_configuration(stage):
    assert stage.load().status == 200
    fits = exactly(1, prompt=[300] * (stage.context - 1), model=stage.id)
    busy(stage)
    stage.start("load", stage.load)
    stage.waiting(1)
    stage.start("infer", lambda _: stage.post(COMPLETIONS, fits))
    stage.waiting(2)
    stage.let_go()
    assert stage.result("load").status == 200
    refused = stage.result("infer")
    assert (refused.status, refused.body["error"]["code"]) == (400, "context_length_exceeded")


# -- two models: what happens to one never waits for the other


def spare_slots(stage):
    idle(stage)
    stage.hold(1)


def full_with_a_queue(stage):
    busy(stage)
    stage.start("queued", stage.infer)
    stage.waiting(1)


def unloading_behind_a_stream(stage):
    spare_slots(stage)
    stage.start("unload", stage.unload)
    stage.waiting(1)
    stage.start("queued", stage.infer)  # a slot is free, and behind the unload it stays free
    stage.waiting(2)
    assert stage.model()["active_slots"] == 1


BESIDE = [spare_slots, full_with_a_queue, unloading_behind_a_stream]


@pytest.mark.parametrize("state", BESIDE, ids=lambda state: state.__name__)
def test_a_ready_model_answers_and_changes_whatever_the_other_does(stage, state):
    assert stage.infer_other().status == 200
    state(stage)
    before = stage.model()
    assert answered(stage, stage.infer_other())
    assert stage.unload_many(ids=["other"]).body == {"unloaded": ["other"], "not_found": []}
    assert answered(stage, stage.infer_other())
    assert stage.model() == before
    stage.let_go()
    assert all(stage.result(name).status == 200 for name in stage.results)
    assert stage.state() == "ready"


@pytest.mark.parametrize("state", BESIDE, ids=lambda state: state.__name__)
def test_a_bulk_unload_frees_the_idle_model_before_the_busy_one(stage, state):
    assert stage.infer_other().status == 200
    state(stage)
    stage.start("bulk", stage.unload_all)
    eventually(lambda: stage.state("other") == "unloaded", PATIENCE, "an unloaded model")
    assert not stage.done("bulk")
    stage.let_go()
    assert all_gone(stage, stage.result("bulk"))
    assert {stage.result(name).status for name in stage.results} == {200}
    assert stage.state() == "unloaded"


def test_bulk_unloads_in_opposite_orders_both_end(stage):
    with Stage(stage.daemon, "other") as other:
        idle(other)
        busy(stage)
        other.hold(1)
        stage.start("forth", stage.unload_many, None, ["m", "other", "m"])
        stage.waiting(1)
        stage.start("back", stage.unload_many, None, ["other", "nobody", "m"])
        stage.waiting(2)
        other.waiting(2)
        other.let_go()
        eventually(lambda: other.state() == "unloaded", PATIENCE, "an unloaded model")
        assert not stage.done("forth")
        assert not stage.done("back")
        stage.let_go()
        assert stage.result("forth").body == {"unloaded": ["m", "other"], "not_found": []}
        assert stage.result("back").body == {"unloaded": ["other", "m"], "not_found": ["nobody"]}


# -- making room: a model goes only where it is idle


@pytest.fixture
def cramped(narrow):
    with Stage(narrow) as stage:
        yield stage
        stage.settle()


@pytest.fixture
def cramped_wide(narrow):
    with Stage(narrow, "wide") as stage:
        yield stage
        stage.settle()


def assert_no_room(told):
    assert told.status == 503
    assert told.body["error"]["type"] == "server_busy"
    assert "max_loaded_models" in told.body["error"]["message"]


def test_an_idle_model_makes_room(cramped):
    idle(cramped)
    assert answered(cramped, cramped.infer_other())
    assert (cramped.state(), cramped.state("other")) == ("unloaded", "ready")


def test_a_busy_model_makes_no_room(cramped):
    spare_slots(cramped)
    assert_no_room(cramped.infer_other())
    assert (cramped.state(), cramped.state("other")) == ("ready", "unloaded")


def test_a_model_with_an_unload_waiting_makes_room_when_it_has_gone(cramped):
    spare_slots(cramped)
    cramped.start("unload", cramped.unload)
    cramped.waiting(1)
    assert_no_room(cramped.infer_other())
    cramped.let_go()
    assert cramped.result("unload").status == 200
    assert answered(cramped, cramped.infer_other())


@pytest.mark.parametrize("state", [loading, reconfiguring], ids=lambda state: state.__name__)
def test_a_model_that_loads_makes_no_room(cramped_wide, state):
    for _ in range(ATTEMPTS):
        cramped_wide.results.clear()
        try:
            state(cramped_wide)
        except MissedError:
            continue
        told = cramped_wide.infer_other()
        if told.status == 200:  # it asked for the place before the load did, or after the load
            cramped_wide.settle()
            assert cramped_wide.unload_all().status == 200  # the other one, too: it would answer at once
            continue
        break
    assert_no_room(told)
    assert cramped_wide.result("first").status == 200
    assert cramped_wide.state() == "ready"


def test_whoever_needs_the_place_of_a_model_that_goes_waits_for_it(cramped_wide):
    for _ in range(ATTEMPTS):
        cramped_wide.results.clear()
        try:
            unloading(cramped_wide)
        except MissedError:
            continue
        break
    assert answered(cramped_wide, cramped_wide.infer_other())
    assert cramped_wide.result("first").status == 200
    assert (cramped_wide.state(), cramped_wide.state("other")) == ("unloaded", "ready")


# -- the end


def test_a_draining_server_takes_nothing_new_and_finishes_what_it_has(tmp_path_factory):
    with serve(tmp_path_factory, 0) as daemon, Stage(daemon) as stage:
        busy(stage)
        stage.start("queued", stage.infer)
        stage.waiting(1)
        stage.start("unload", stage.unload)
        stage.waiting(2)
        daemon.signal(signal.SIGTERM)
        daemon.wait_for_log("draining active=4")
        for operation in OPERATIONS:
            told = getattr(stage, operation)()
            assert (told.status, told.body["error"]["type"]) == (503, "shutting_down")
        stage.let_go()
        assert answered(stage, stage.result("queued"))
        assert gone(stage, stage.result("unload"))
        assert daemon.finish() == 0
