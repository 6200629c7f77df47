"""Registering, reconfiguring and unloading models: what is refused changes nothing, and nothing stays behind."""

import os

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.config import ModelConfig
from trioserve.errors import (
    InvalidModelError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    ServerBusyError,
    ShuttingDownError,
)
from trioserve.scheduling.lifecycle import ModelState
from trioserve.service import GenerationRequest, TextDelta, TextPrompt
from trioserve.testing import FakeSession, ThreadGate, fake_answer

READY, UNLOADED = ModelState.READY, ModelState.UNLOADED
ANSWER = fake_answer(b"prompt", 3)


async def use(service, model="m", **fields):
    request = GenerationRequest(TextPrompt("prompt"), model=model, max_tokens=3, **fields)
    async with service.generate(request) as generation:
        return "".join([part.text async for part in generation if isinstance(part, TextDelta)])


def status(service, model="m"):
    return next(status for status in service.models() if status.id == model)


def ids(service):
    return [status.id for status in service.models()]


class Caller:
    """A task that calls something, in a cancel scope of its own."""

    def __init__(self, nursery, call, *args):
        self.scope = trio.CancelScope()
        self.result = self.error = None
        self.ended = False
        nursery.start_soon(self._run, call, args)

    async def _run(self, call, args):
        with self.scope:
            try:
                self.result = await call(*args)
            except Exception as error:
                self.error = error
        self.ended = True


@pytest.fixture
def service_with(service_for, make_model_file, tmp_path):
    """A service with the models ``m`` and ``other`` of two files, and the files' folder as a root."""

    def open_one(**settings):
        m, other = (
            ModelConfig(path=make_model_file(f"{name}.gguf"), id=name, lazy=True, **settings) for name in ("m", "other")
        )
        return service_for(m, other, management=True, model_roots=(tmp_path,))

    return open_one


@pytest.fixture
def inspect_gate(engine, monkeypatch):
    """The gate that every look into a file passes."""
    gate, inspect = ThreadGate(), engine.inspect
    monkeypatch.setattr(engine, "inspect", lambda path, adapters: gate.wait() and inspect(path, adapters))
    return gate


# -- register


async def test_a_new_model_is_registered_and_loaded(service_with, make_model_file):
    async with service_with() as service:
        path = make_model_file("fresh.gguf")
        told = await service.management.load({"id": "new", "path": str(path), "slots": 2, "n_ctx": 256})
        assert (told.id, told.state, told.loaded, told.slots, told.n_ctx) == ("new", READY, True, 2, 256)
        assert ids(service) == ["m", "other", "new"]
        assert await use(service, "new") == ANSWER


async def test_a_new_model_is_named_after_its_file(service_with, make_model_file):
    async with service_with() as service:
        assert (await service.management.load({"path": str(make_model_file("fresh.gguf"))})).id == "fresh"


async def test_a_file_in_use_can_be_registered_again_and_is_loaded_once(service_for, model_file, engine):
    async with service_for() as service:
        assert await use(service, "tiny") == ANSWER
        await service.management.load({"id": "twin", "path": str(model_file)})
        assert await use(service, "twin") == ANSWER
        assert engine.loads == 1


async def test_a_file_that_is_refused_leaves_no_registration(service_with, make_model_file, engine):
    async with service_with() as service:
        engine.refused = "bad.gguf"
        with pytest.raises(InvalidModelError, match=r"bad\.gguf.*refuse it") as caught:
            await service.management.load({"id": "new", "path": str(make_model_file("bad.gguf"))})
        assert caught.value.param == "path"
        assert ids(service) == ["m", "other"]


async def test_a_load_that_fails_leaves_a_registration_that_the_next_request_loads(
    service_with, make_model_file, engine
):
    async with service_with() as service:
        engine.failing_loads = 1
        with pytest.raises(ModelLoadError):
            await service.management.load({"id": "new", "path": str(make_model_file("new.gguf"))})
        assert status(service, "new").state is UNLOADED
        assert await use(service, "new") == ANSWER


async def test_two_registrations_of_one_id_make_one_model(service_with, make_model_file, inspect_gate):
    async with service_with() as service, trio.open_nursery() as nursery:
        inspect_gate.shut()
        settings = {"id": "new", "path": str(make_model_file("new.gguf"))}
        callers = [Caller(nursery, service.management.load, settings) for _ in range(2)]
        await inspect_gate.arrived(2)
        inspect_gate.open()
    assert [caller.error for caller in callers] == [None, None]
    assert ids(service) == ["m", "other", "new"]


async def test_a_request_in_the_very_moment_of_the_registration_is_answered(service_with, make_model_file, monkeypatch):
    async with service_with() as service, trio.open_nursery() as nursery:
        users, add = [], service.registry.add

        def add_then_use(model):
            add(model)
            users.append(Caller(nursery, use, service, model.id))

        monkeypatch.setattr(service.registry, "add", add_then_use)
        for number in range(10):  # which task is first in a tick is random
            told = await service.management.load({"id": f"new{number}", "path": str(make_model_file("new.gguf"))})
            assert told.loaded
    assert [(user.result, user.error) for user in users] == [(ANSWER, None)] * 10


# -- reconfigure


async def test_what_is_left_out_or_null_stays_as_it_is(service_with):
    async with service_with(slots=3, n_ctx=512) as service:
        await use(service)
        told = await service.management.load({"id": "m", "slots": 2, "n_ctx": None, "path": None})
        assert (told.slots, told.n_ctx, told.state) == (2, 512, READY)
        assert await use(service) == ANSWER


async def test_a_model_that_is_named_by_its_file_alone_keeps_its_settings(service_with, tmp_path):
    async with service_with(slots=3) as service:
        told = await service.management.load({"path": str(tmp_path / "m.gguf"), "n_ctx": 256})
        assert (told.id, told.slots, told.n_ctx) == ("m", 3, 256)


async def test_the_batch_follows_a_smaller_one_where_it_was_left_to_the_server(service_with):
    async with service_with() as service:
        await service.management.load({"id": "m", "n_batch": 100})
        assert service.registry.get("m").config.n_ubatch == 100


async def test_the_configuration_that_is_loaded_changes_nothing(service_with, engine):
    async with service_with(slots=2) as service:
        await use(service)
        pool = service.registry.get("m").pool
        told = await service.management.load({"id": "m", "slots": 2})
        assert told.state is READY
        assert service.registry.get("m").pool is pool
        assert (engine.loads, engine.closed) == (1, [])


@pytest.mark.parametrize(
    "change",
    [{"kv_dtype": "f16"}, {"busy_timeout_ms": 5}, {"max_queued_requests": 0}, {"keep_alive_ms": 9999}, {"lazy": False}],
    ids=str,
)
async def test_what_needs_no_new_sessions_is_changed_without_any(service_with, engine, change, eventually):
    async with service_with(slots=2) as service:
        await use(service)
        model = service.registry.get("m")
        pool = model.pool
        await eventually(lambda: model._gate.idle)
        await service.management.load({"id": "m", **change})
        assert model.config.model_dump() == {**model.config.model_dump(), **change}
        assert model.pool is pool
        assert (engine.loads, engine.closed, len(pool.weights.sessions)) == (1, [], 2)


async def test_a_new_bound_of_the_queue_holds_at_once(service_with, engine):
    async with service_with() as service, trio.open_nursery() as nursery:
        await use(service)
        await service.management.load({"id": "m", "max_queued_requests": 0})
        engine.step_gate.shut()
        Caller(nursery, use, service)
        await engine.step_gate.arrived(4)
        with pytest.raises(ServerBusyError, match="max_queued_requests"):
            await use(service)
        engine.step_gate.open()


async def test_an_unloaded_model_is_loaded(service_with, engine):
    async with service_with() as service:
        assert (await service.management.load({"id": "m"})).state is READY
        assert engine.loads == 1


async def test_the_weights_of_one_file_stay_for_the_new_sessions(service_with, engine):
    async with service_with(slots=2) as service:
        await use(service)
        await service.management.load({"id": "m", "slots": 3})
        assert engine.loads == 1
        assert [len(service.registry.get("m").pool.slots), *engine.closed] == [3, "m[2]", "m[1]", "m[0]"]


async def test_another_file_replaces_the_weights(service_with, make_model_file, engine):
    async with service_with() as service:
        await use(service)
        await service.management.load({"id": "m", "path": str(make_model_file("better.gguf"))})
        assert engine.closed == ["better[0]", "m[0]", "m"], "first the session that was tried, then the old pool"
        assert engine.loads == 2
        assert service.registry.get("m").pool.weights.name == "better"


async def test_without_memory_for_both_the_old_one_goes_first(service_with, make_model_file, engine, monkeypatch):
    async with service_with() as service:
        await use(service)
        monkeypatch.setattr(service.registry.get("m")._house.residency, "_free", lambda: 0)
        await service.management.load({"id": "m", "path": str(make_model_file("better.gguf"))})
        assert engine.closed == ["m[0]", "m"]
        assert await use(service) == ANSWER


@pytest.fixture
def starting(service_for, make_model_file, tmp_path):
    """A service with a model ``m`` that loads at the start."""
    model = ModelConfig(path=make_model_file("m.gguf"), id="m", slots=2)
    return service_for(model, management=True, model_roots=(tmp_path,))


async def test_a_load_right_at_the_start_takes_its_turn_after_the_start(starting, engine):
    async with starting as service:
        told = await service.management.load({"id": "m", "n_ctx": 512})
        assert (told.n_ctx, told.state) == (512, READY)
        await service.wait_started()
        assert len(service.registry.get("m").pool.slots) == 2


@pytest.mark.parametrize("operation", ["load", "unload"])
async def test_an_operation_that_may_not_wait_is_refused_while_the_start_loads(starting, engine, operation):
    engine.load_gate.shut()
    async with starting as service:
        await engine.load_gate.arrived()
        call = {
            "load": lambda: service.management.load({"id": "m", "n_ctx": 512, "busy_timeout_ms": 0}),
            "unload": lambda: service.management.unload("m", busy_timeout_ms=0),
        }[operation]
        with pytest.raises(ServerBusyError):
            await call()
        engine.load_gate.open()
        await service.wait_started()
        assert status(service).n_ctx == 4096


# -- what is refused


REFUSED = [
    ({"slot": 2}, "slot", "unknown setting 'slot'; did you mean slots?"),
    ({"port": 1}, "port", "unknown setting 'port'"),
    ({"slots": 0}, "slots", "slots: 0 is not an integer 1..16"),
    ({"slots": 17}, "slots", "slots: 17 is not an integer 1..16"),
    ({"slots": "2"}, "slots", "slots: '2' is not an integer 1..16"),
    ({"slots": True}, "slots", "slots: True is not an integer 1..16"),
    ({"slots": 2.0}, "slots", "slots: 2.0 is not an integer 1..16"),
    ({"n_ctx": 1}, "n_ctx", "n_ctx: 1 is not an integer 16..16777216 or null"),
    ({"n_ubatch": 4096}, "n_ubatch", "n_ubatch: 4096 is more than n_batch, which is 2048"),
    ({"kv_dtype": "q5"}, "kv_dtype", "kv_dtype: 'q5' is not one of f32, f16, bf16, q8_0, q4_0"),
    ({"kv_dtype": "q8_0", "flash_attention": "off"}, "flash_attention", "needs flash attention"),
    ({"lazy": 1}, "lazy", "lazy: 1 is not one of true, false"),
    ({"chat_template": "@/etc/hostname"}, "chat_template", "for the operator's configuration only"),
    ({"busy_timeout_ms": -1}, "busy_timeout_ms", "busy_timeout_ms: -1 is not an integer 0.."),
    ({"path": 5}, "path", "path: 5 is not a path"),
    ({"path": ""}, "path", "the path is empty"),
    ({"path": "a\0b"}, "path", "NUL"),
    ({"path": "/etc/hostname"}, "path", "model_roots"),
    ({"path": "../../../../etc/hostname"}, "path", "model_roots"),
]


@pytest.mark.parametrize(("change", "param", "said"), REFUSED, ids=str)
async def test_settings_that_cannot_be_are_refused_and_change_nothing(service_with, engine, change, param, said):
    async with service_with(slots=2) as service:
        await use(service)
        model = service.registry.get("m")
        pool, config = model.pool, model.config
        with pytest.raises(InvalidRequestError) as caught:
            await service.management.load({"id": "m", **change})
        assert said in caught.value.message
        assert caught.value.param == param
        assert (model.pool, model.config) == (pool, config)
        assert (engine.loads, engine.closed) == (1, [])


@pytest.mark.parametrize(("settings", "param"), [({}, "path"), ({"id": "new"}, "path"), ({"id": 5, "path": "a"}, "id")])
async def test_a_new_model_needs_a_path_and_a_name(service_with, settings, param):
    async with service_with() as service:
        with pytest.raises(InvalidRequestError) as caught:
            await service.management.load(settings)
        assert caught.value.param == param
        assert ids(service) == ["m", "other"]


async def test_an_unloaded_model_keeps_its_configuration_where_another_one_is_refused(service_with, engine):
    async with service_with() as service:
        engine.max_sessions = 2
        with pytest.raises(InvalidModelError, match="2 at most") as caught:
            await service.management.load({"id": "m", "slots": 3})
        assert caught.value.param == "slots"
        assert (status(service).slots, status(service).state) == (1, UNLOADED)
        assert await use(service) == ANSWER


async def test_more_slots_than_the_model_can_have_are_refused_and_it_serves_on(service_with, engine):
    engine.max_sessions = 2
    async with service_with() as service:
        await use(service)
        pool = service.registry.get("m").pool
        with pytest.raises(InvalidModelError, match="2 at most") as caught:
            await service.management.load({"id": "m", "slots": 3})
        assert caught.value.param == "slots"
        assert service.registry.get("m").pool is pool
        assert engine.closed == []


@pytest.mark.parametrize("content", [None, b"", b"no model at all", b"GGUF"])
async def test_a_replacement_that_is_no_model_is_refused_and_the_old_one_serves_on(service_with, tmp_path, content):
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    async with service_with() as service:
        await use(service)
        pool = service.registry.get("m").pool
        with pytest.raises(InvalidModelError):
            await service.management.load({"id": "m", "path": str(path)})
        assert service.registry.get("m").pool is pool
        assert await use(service) == ANSWER


async def test_the_live_model_serves_while_a_replacement_is_tried_that_fails(service_with, make_model_file, engine):
    async with service_with() as service, trio.open_nursery() as nursery:
        await use(service)
        model = service.registry.get("m")
        pool = model.pool
        engine.load_gate.shut()
        engine.failing_loads = 1
        caller = Caller(nursery, service.management.load, {"id": "m", "path": str(make_model_file("new.gguf"))})
        await engine.load_gate.arrived(2)
        assert status(service).state is READY
        assert await use(service) == ANSWER
        engine.load_gate.open()
        with trio.fail_after(30):
            while not caller.ended:
                await trio.lowlevel.checkpoint()
        assert isinstance(caller.error, ModelLoadError)
        assert (model.pool, model.config.path.name) == (pool, "m.gguf")
        assert engine.closed == []


async def test_a_session_that_cannot_be_made_beside_the_live_ones_changes_nothing(service_with, engine):
    async with service_with() as service:
        await use(service)
        model = service.registry.get("m")
        pool = model.pool
        engine.failing_session = 1
        with pytest.raises(ModelLoadError):
            await service.management.load({"id": "m", "n_ctx": 512})
        assert model.pool is pool
        assert engine.closed == []
        assert await use(service) == ANSWER


async def test_a_load_that_fails_after_the_old_pool_is_gone_leaves_the_new_configuration(service_with, engine):
    async with service_with() as service:
        await use(service)
        engine.failing_session = 2  # 0 is the live one's, 1 the one that is tried
        with pytest.raises(ModelLoadError):
            await service.management.load({"id": "m", "n_ctx": 512, "slots": 2})
        assert (status(service).state, status(service).slots) == (UNLOADED, 2)
        assert engine.closed == ["m[1]", "m[0]", "m"]
        assert await use(service) == ANSWER
        assert (status(service).n_ctx, len(service.registry.get("m").pool.slots)) == (512, 2)


@pytest.mark.parametrize("content", [None, b"no model at all"])
@pytest.mark.parametrize("loaded_by", ["request", "operation"])
async def test_a_replacement_of_what_is_loaded_meanwhile_is_tried_in_its_turn(
    service_with, tmp_path, engine, loaded_by, content
):
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    async with service_with() as service, trio.open_nursery() as nursery:
        engine.load_gate.shut()
        if loaded_by == "request":
            Caller(nursery, use, service)
        else:
            Caller(nursery, service.management.load, {"id": "m"})
        await engine.load_gate.arrived()
        caller = Caller(nursery, service.management.load, {"id": "m", "path": str(path)})
        await wait_all_tasks_blocked()
        engine.load_gate.open()
        while not caller.ended:
            await trio.lowlevel.checkpoint()
        assert isinstance(caller.error, InvalidModelError)
        assert (status(service).state, engine.closed, engine.loads) == (READY, [], 1)
        assert service.registry.get("m").config.path.name == "m.gguf"


async def test_a_replacement_that_cannot_be_loaded_is_found_out_in_its_turn(service_with, make_model_file, engine):
    async with service_with() as service, trio.open_nursery() as nursery:
        engine.load_gate.shut()
        Caller(nursery, use, service)
        await engine.load_gate.arrived()
        caller = Caller(nursery, service.management.load, {"id": "m", "path": str(make_model_file("new.gguf"))})
        await wait_all_tasks_blocked()
        engine.load_gate.let()
        await engine.load_gate.arrived(2)
        engine.failing_loads = 1
        engine.load_gate.open()
        while not caller.ended:
            await trio.lowlevel.checkpoint()
        assert isinstance(caller.error, ModelLoadError)
        assert (status(service).state, engine.closed) == (READY, [])
        assert await use(service) == ANSWER


async def test_loads_of_one_model_that_wait_together_keep_each_others_settings(service_with, engine):
    async with service_with() as service, trio.open_nursery() as nursery:
        engine.step_gate.shut()
        Caller(nursery, use, service)
        await engine.step_gate.arrived()
        callers = [
            Caller(nursery, service.management.load, {"id": "m", **change}) for change in ({"n_ctx": 512}, {"slots": 2})
        ]
        while service.registry.get("m")._gate.statistics().waiting_managers < 2:
            await trio.lowlevel.checkpoint()
        engine.step_gate.open()
        while not all(caller.ended for caller in callers):
            await trio.lowlevel.checkpoint()
        assert [caller.error for caller in callers] == [None, None]
        assert (status(service).n_ctx, status(service).slots) == (512, 2)


async def test_a_load_whose_settings_do_not_go_with_what_came_before_it_changes_nothing(service_with, engine):
    async with service_with() as service, trio.open_nursery() as nursery:
        engine.step_gate.shut()
        Caller(nursery, use, service)
        await engine.step_gate.arrived()
        first = Caller(nursery, service.management.load, {"id": "m", "n_batch": 100})
        model = service.registry.get("m")
        while model._gate.statistics().waiting_managers < 1:
            await trio.lowlevel.checkpoint()
        second = Caller(nursery, service.management.load, {"id": "m", "n_ubatch": 200})
        while model._gate.statistics().waiting_managers < 2:
            await trio.lowlevel.checkpoint()
        engine.step_gate.open()
        while not second.ended:
            await trio.lowlevel.checkpoint()
        assert first.error is None
        assert isinstance(second.error, InvalidRequestError)
        assert (status(service).state, model.config.n_batch, model.config.n_ubatch) == (READY, 100, 100)


async def test_a_load_that_may_not_wait_is_refused_before_it_is_tried(service_with, make_model_file, engine):
    async with service_with() as service, trio.open_nursery() as nursery:
        engine.step_gate.shut()
        Caller(nursery, use, service)
        await engine.step_gate.arrived()
        new = str(make_model_file("new.gguf"))
        with pytest.raises(ServerBusyError):
            await service.management.load({"id": "m", "path": new, "busy_timeout_ms": 0})
        assert engine.loads == 1
        engine.step_gate.open()


# -- roots


async def test_files_outside_of_the_roots_are_refused_whether_they_exist_or_not(
    service_with, make_model_file, tmp_path
):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    secret = outside / "secret.gguf"
    secret.write_bytes(make_model_file("x.gguf").read_bytes())
    (tmp_path / "link.gguf").symlink_to(secret)
    (tmp_path / "folder").symlink_to(outside)
    (tmp_path / "circle.gguf").symlink_to(tmp_path / "circle.gguf")
    async with service_with() as service:
        said = set()
        for name in (
            str(secret),
            f"{outside}/none.gguf",
            f"{tmp_path}/link.gguf",
            f"{tmp_path}/folder/secret.gguf",
            f"{tmp_path}/../{outside.name}/secret.gguf",
            f"{tmp_path}-outside/secret.gguf",
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await service.management.load({"id": "new", "path": name})
            assert caught.value.param == "path"
            said.add(caught.value.message.replace(repr(name), "NAME"))
        assert said == {"path: NAME is not below a folder that requests may load from (model_roots)"}
        with pytest.raises(InvalidRequestError):
            await service.management.load({"id": "new", "path": str(tmp_path / "circle.gguf")})
        assert ids(service) == ["m", "other"]


async def test_links_into_a_root_and_subfolders_are_fine(service_with, make_model_file, tmp_path):
    (tmp_path / "sub").mkdir()
    inside = make_model_file("sub/deep.gguf")
    link = tmp_path.parent / f"{tmp_path.name}.gguf"
    link.symlink_to(inside)
    async with service_with() as service:
        for name, path in (("deep", inside), ("linked", link)):
            assert (await service.management.load({"id": name, "path": str(path)})).loaded


@pytest.fixture
def outside(tmp_path, make_model_file):
    """A model's file beside the root."""
    folder = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    folder.mkdir()
    file = folder / "secret.gguf"
    file.write_bytes(make_model_file("x.gguf").read_bytes())
    return file


async def test_no_spelling_of_a_path_leads_out_of_the_roots(service_with, tmp_path, outside, monkeypatch):
    monkeypatch.chdir(outside.parent)
    (tmp_path / "chain.gguf").symlink_to("chain2.gguf")
    (tmp_path / "chain2.gguf").symlink_to(outside)
    (tmp_path / "dangling.gguf").symlink_to(outside.parent / "none.gguf")
    (tmp_path / "up").symlink_to("..")
    (tmp_path / "proc").symlink_to("/proc/self/cwd")
    with outside.open("rb") as opened:
        names = [
            "secret.gguf",
            "./secret.gguf",
            f"{tmp_path}/./../{outside.parent.name}/secret.gguf",
            f"{tmp_path}/none/../../{outside.parent.name}/secret.gguf",
            f"{tmp_path}/chain.gguf",
            f"{tmp_path}/dangling.gguf",
            f"{tmp_path}/up/{outside.parent.name}/secret.gguf",
            f"{tmp_path}/proc/secret.gguf",
            f"//{outside}",
            f"/proc/self/root{outside}",
            f"/proc/thread-self/root{outside}",
            "/proc/self/cwd/secret.gguf",
            f"/proc/self/fd/{opened.fileno()}",
            f"/dev/fd/{opened.fileno()}",
            f"{tmp_path}/../../../../../../../../../proc/self/root{outside}",
            "~/secret.gguf",
            f"{tmp_path}\ud800.gguf",
            "/dev/zero",
            "/",
        ]
        async with service_with() as service:
            for name in names:
                with pytest.raises(InvalidRequestError, match="model_roots") as caught:
                    await service.management.load({"id": "new", "path": name})
                assert caught.value.param == "path"
            for name in (f"{tmp_path}/m.gguf\0", f"{outside}\0/{tmp_path}/m.gguf", "\0"):
                with pytest.raises(InvalidRequestError, match="NUL"):
                    await service.management.load({"id": "new", "path": name})
            assert ids(service) == ["m", "other"]


async def test_ways_that_end_below_a_root_are_fine(service_with, make_model_file, tmp_path, monkeypatch):
    inside = make_model_file("inside.gguf")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    async with service_with() as service:
        for number, name in enumerate(("../inside.gguf", f"{tmp_path}/sub/../inside.gguf", f"/proc/self/root{inside}")):
            assert (await service.management.load({"id": f"new{number}", "path": name})).loaded
            assert service.registry.get(f"new{number}").config.path == inside, "what was judged is what is opened"


async def test_a_root_that_is_a_link_is_the_folder_that_it_leads_to(service_for, make_model_file, tmp_path, outside):
    root = tmp_path / "root"
    root.symlink_to(outside.parent)
    async with service_for(management=True, model_roots=(root,)) as service:
        for path in (root / "secret.gguf", outside):
            assert (await service.management.load({"id": f"by {path}", "path": str(path)})).loaded
        with pytest.raises(InvalidRequestError, match="model_roots"):
            await service.management.load({"path": str(make_model_file("beside.gguf"))})


async def test_a_link_that_is_led_elsewhere_later_is_not_followed(service_with, make_model_file, tmp_path, outside):
    make_model_file("inside.gguf")
    link = tmp_path / "link.gguf"
    link.symlink_to("inside.gguf")
    async with service_with() as service:
        assert (await service.management.load({"path": str(link)})).id == "link"
        await service.management.unload("link")
        link.unlink()
        link.symlink_to(outside)
        assert await use(service, "link") == ANSWER
        assert service.registry.get("link").pool.weights.name == "inside"
        with pytest.raises(InvalidRequestError, match="model_roots"):
            await service.management.load({"path": str(link)})


async def test_the_operators_own_link_stays_a_link(service_for, make_model_file, tmp_path, outside):
    link = tmp_path / "current.gguf"
    link.symlink_to(outside)
    model = ModelConfig(path=link, id="m", lazy=True)
    async with service_for(model, management=True) as service:
        assert (await service.management.load({"id": "m", "n_ctx": 512})).n_ctx == 512
        assert (await service.management.load({"id": "m", "path": str(link)})).loaded
        assert service.registry.get("m").config.path == link


async def test_without_roots_only_files_in_use_can_be_loaded(service_for, model_file, make_model_file):
    async with service_for(management=True) as service:
        with pytest.raises(InvalidRequestError, match="model_roots"):
            await service.management.load({"path": str(make_model_file("new.gguf"))})
        indirect = model_file.parent / "." / model_file.name
        assert (await service.management.load({"id": "twin", "path": os.fspath(indirect)})).loaded


async def test_a_root_that_is_not_there_opens_nothing(service_for, make_model_file, tmp_path):
    async with service_for(management=True, model_roots=(tmp_path / "none",)) as service:
        with pytest.raises(InvalidRequestError, match="model_roots"):
            await service.management.load({"path": str(make_model_file("new.gguf"))})


# -- unload


async def test_an_unload_is_idempotent_and_the_model_stays_known(service_with, engine):
    async with service_with() as service:
        await use(service)
        for _ in range(2):
            told = await service.management.unload("m")
            assert (told.id, told.state, told.loaded) == ("m", UNLOADED, False)
        assert engine.closed == ["m[0]", "m"]
        assert await use(service) == ANSWER


async def test_an_unknown_id_is_said_to_be(service_with):
    async with service_with() as service:
        with pytest.raises(ModelNotFoundError, match="'nobody'") as caught:
            await service.management.unload("nobody")
        assert caught.value.param == "id"


async def test_a_bulk_unload_tells_each_id_once_in_the_order_of_the_request(service_with):
    async with service_with() as service:
        await use(service)
        told = await service.management.unload_many(["no", "other", "m", "other", "no", "never"])
        assert (told.unloaded, told.not_found) == (["other", "m"], ["no", "never"])


async def test_a_bulk_unload_of_everything_tells_all_that_are_registered(service_with, make_model_file):
    async with service_with() as service:
        await service.management.load({"path": str(make_model_file("new.gguf"))})
        told = await service.management.unload_all()
        assert (told.unloaded, told.not_found) == (["m", "other", "new"], [])
        assert [status.state for status in service.models()] == [UNLOADED] * 3


@pytest.mark.parametrize("order", [["m", "other"], ["other", "m"]])
async def test_a_bulk_unload_that_is_turned_away_on_arrival_changes_nothing(service_with, engine, order):
    async with service_with() as service, trio.open_nursery() as nursery:
        await use(service, "other")
        engine.step_gate.shut()
        Caller(nursery, use, service)
        await engine.step_gate.arrived(4)
        with pytest.raises(ServerBusyError):
            await service.management.unload_many(order, busy_timeout_ms=0)
        assert status(service, "other").state is READY
        assert service.registry.get("other")._gate.idle
        assert engine.closed == []
        engine.step_gate.open()


async def test_a_bulk_unload_that_runs_out_of_time_has_unloaded_the_others(service_with, engine, mock_clock):
    async with service_with() as service, trio.open_nursery() as nursery:
        await use(service, "other")
        engine.step_gate.shut()
        user = Caller(nursery, use, service)
        await engine.step_gate.arrived(4)
        caller = Caller(nursery, service.management.unload_many, ["m", "other"], 1000)
        while status(service, "other").state is not UNLOADED:
            await trio.lowlevel.checkpoint()
        assert not caller.ended
        mock_clock.jump(2)
        await wait_all_tasks_blocked()
        assert isinstance(caller.error, ServerBusyError)
        assert "not unloaded: m: " in caller.error.message
        assert status(service).state is READY
        engine.step_gate.open()
    assert user.result == ANSWER


async def test_an_id_that_is_registered_during_a_bulk_unload_was_not_found(service_with, engine, make_model_file):
    async with service_with() as service, trio.open_nursery() as nursery:
        engine.step_gate.shut()
        Caller(nursery, use, service)
        await engine.step_gate.arrived()
        bulk = Caller(nursery, service.management.unload_many, ["m", "new"])
        await wait_all_tasks_blocked()
        await service.management.load({"id": "new", "path": str(make_model_file("new.gguf"))})
        engine.step_gate.open()
        while not bulk.ended:
            await trio.lowlevel.checkpoint()
        assert (bulk.result.unloaded, bulk.result.not_found) == (["m"], ["new"])


async def test_something_unforeseen_in_a_bulk_unload_is_told_as_it_is(service_with, monkeypatch):
    async with service_with() as service:
        await use(service)
        await use(service, "other")

        async def fail():
            raise ValueError("unforeseen")

        monkeypatch.setattr(service.registry.get("m")._loader, "settle", fail)
        with pytest.raises(ValueError, match="unforeseen"):
            await service.management.unload_all()
        assert status(service, "other").state is UNLOADED
        monkeypatch.undo()


@pytest.mark.parametrize("operation", ["load", "unload", "unload_all"])
async def test_an_operation_that_may_not_wait_is_refused_by_a_busy_model(service_with, engine, operation):
    calls = {
        "load": lambda manage: manage.load({"id": "m", "n_ctx": 512, "busy_timeout_ms": 0}),
        "unload": lambda manage: manage.unload("m", busy_timeout_ms=0),
        "unload_all": lambda manage: manage.unload_all(busy_timeout_ms=0),
    }
    async with service_with() as service, trio.open_nursery() as nursery:
        engine.step_gate.shut()
        user = Caller(nursery, use, service)
        await engine.step_gate.arrived()
        with pytest.raises(ServerBusyError):
            await calls[operation](service.management)
        assert status(service).queued_requests == 0
        assert service.registry.get("m").config.n_ctx is None
        engine.step_gate.open()
    assert user.result == ANSWER


# -- callers that leave


async def test_an_operation_that_leaves_lets_those_behind_it_in(service_with, engine):
    async with service_with(slots=2) as service, trio.open_nursery() as nursery:
        engine.step_gate.shut()
        first = Caller(nursery, use, service)
        await engine.step_gate.arrived()
        manager = Caller(nursery, service.management.unload, "m")
        await wait_all_tasks_blocked()
        second = Caller(nursery, use, service)
        await wait_all_tasks_blocked()
        assert (status(service).active_slots, status(service).queued_requests) == (1, 1)
        manager.scope.cancel()
        await engine.step_gate.arrived(2)
        assert (status(service).active_slots, status(service).queued_requests) == (2, 0)
        engine.step_gate.open()
    assert (first.result, second.result) == (ANSWER, ANSWER)
    assert engine.loads == 1


async def test_a_bulk_unload_that_leaves_takes_all_its_barriers_down(service_with, engine):
    async with service_with() as service, trio.open_nursery() as nursery:
        engine.step_gate.shut()
        users = [Caller(nursery, use, service, name) for name in ("m", "other")]
        await engine.step_gate.arrived(2)
        bulk = Caller(nursery, service.management.unload_all)
        await wait_all_tasks_blocked()
        bulk.scope.cancel()
        await wait_all_tasks_blocked()
        for name in ("m", "other"):
            assert service.registry.get(name)._gate.statistics().waiting_managers == 0
        engine.step_gate.open()
    assert [user.result for user in users] == [ANSWER, ANSWER]
    assert [status.state for status in service.models() if status.state is not UNLOADED] == []


def shut_before(engine, place):
    """Shut the gate of the place where a reconfiguration is to be left; return it, and which arrival there is that."""
    gate, before, count = {
        "load": (engine.load_gate, 0, 2),
        "session": (engine.session_gate, 0, 2),
        "teardown": (engine.close_gate, 1, 2),  # the session that is tried goes before the old pool
        "new session": (engine.session_gate, 1, 3),
    }[place]
    gate.shut()
    gate.let(before)
    return gate, count


@pytest.mark.parametrize("place", ["load", "session", "teardown", "new session"])
async def test_a_reconfiguration_left_anywhere_leaves_a_model_that_works(
    service_with, engine, make_model_file, monkeypatch, place
):
    made, init = [], FakeSession.__init__
    monkeypatch.setattr(FakeSession, "__init__", lambda self, *args: made.append(self) or init(self, *args))
    async with service_with() as service:
        await use(service)
        gate, count = shut_before(engine, place)
        async with trio.open_nursery() as nursery:
            settings = {"id": "m", "n_ctx": 512, "path": str(make_model_file("new.gguf"))}
            caller = Caller(nursery, service.management.load, settings)
            await gate.arrived(count)
            caller.scope.cancel()
            await wait_all_tasks_blocked()
            gate.open()
        assert caller.error is None
        assert await use(service) == ANSWER
        committed = place in {"teardown", "new session"}
        assert status(service).n_ctx == (512 if committed else 4096)
        assert service.registry.get("m").config.path.stem == ("new" if committed else "m")
        await service.management.unload_all()
        given_up = place == "load"
        assert sum("[" not in name for name in engine.closed) == engine.loads - given_up, "all weights are freed"
        assert sum("[" in name for name in engine.closed) == len(made), "all sessions are freed"


async def test_a_reconfiguration_that_leaves_while_it_waits_for_its_turn_changes_nothing(service_with, engine):
    async with service_with() as service, trio.open_nursery() as nursery:
        engine.step_gate.shut()
        user = Caller(nursery, use, service)
        await engine.step_gate.arrived()
        caller = Caller(nursery, service.management.load, {"id": "m", "n_ctx": 512})
        model = service.registry.get("m")
        while model._gate.statistics().waiting_managers == 0:
            await trio.lowlevel.checkpoint()
        caller.scope.cancel()
        await wait_all_tasks_blocked()
        assert (model._gate.statistics().waiting_managers, model.config.n_ctx) == (0, None)
        engine.step_gate.open()
    assert user.result == ANSWER


@pytest.mark.parametrize("place", ["inspect", "load"])
async def test_a_registration_left_anywhere_is_whole_or_not_there(
    service_with, engine, inspect_gate, make_model_file, eventually, place
):
    async with service_with() as service:
        gate = {"inspect": inspect_gate, "load": engine.load_gate}[place]
        gate.shut()
        async with trio.open_nursery() as nursery:
            caller = Caller(nursery, service.management.load, {"id": "new", "path": str(make_model_file("new.gguf"))})
            await gate.arrived()
            caller.scope.cancel()
            await wait_all_tasks_blocked()
            gate.open()
        if place == "inspect":
            assert "new" not in ids(service)
            return
        await eventually(lambda: status(service, "new").state is READY)
        assert await use(service, "new") == ANSWER
        assert engine.loads == 1


async def test_a_caller_that_leaves_as_its_model_is_registered_leaves_it_with_its_task(
    service_with, make_model_file, monkeypatch
):
    async with service_with() as service, trio.open_nursery() as nursery:
        caller, add = None, service.registry.add

        def cancel_then_add(model):
            caller.scope.cancel()
            add(model)

        monkeypatch.setattr(service.registry, "add", cancel_then_add)
        settings = {"id": "new", "path": str(make_model_file("new.gguf"))}
        caller = Caller(nursery, service.management.load, settings)
        while not caller.ended:
            await trio.lowlevel.checkpoint()
        assert ids(service) == ["m", "other", "new"]
        assert await use(service, "new") == ANSWER


# -- the end


async def test_a_draining_service_changes_nothing_any_more(service_with, make_model_file):
    async with service_with() as service:
        await use(service)
        await service.drain()
        manage = service.management
        for call in (
            lambda: manage.load({"id": "m", "slots": 2}),
            lambda: manage.load({"path": str(make_model_file("new.gguf"))}),
            lambda: manage.unload("m"),
            lambda: manage.unload_many(["m"]),
            lambda: manage.unload_all(),
        ):
            with pytest.raises(ShuttingDownError):
                await call()
        assert ids(service) == ["m", "other"]


@pytest.mark.parametrize("model", ["new", "m"])
async def test_a_drain_waits_for_an_operation_that_is_under_way(
    service_with, make_model_file, inspect_gate, model, caplog
):
    caplog.set_level("INFO")
    async with service_with() as service, trio.open_nursery() as nursery:
        inspect_gate.shut()
        caller = Caller(nursery, service.management.load, {"id": model, "path": str(make_model_file("new.gguf"))})
        await inspect_gate.arrived()
        drain = Caller(nursery, service.drain)
        await wait_all_tasks_blocked()
        assert not drain.ended
        inspect_gate.open()
        while not drain.ended:
            await trio.lowlevel.checkpoint()
        assert caller.result.loaded
        assert (drain.result.finished, drain.result.complete) == (1, True)
    (line,) = [record for record in caplog.records if record.name == "trioserve.request"]
    assert line.getMessage() == "request finished"
    assert (line.fields["model"], line.fields["operation"]) == (model, "load")


@pytest.mark.parametrize("operation", ["load", "unload", "unload_all"])
async def test_a_drain_cuts_off_operations_that_wait_too_long(service_with, engine, operation):
    calls = {
        "load": lambda manage: manage.load({"id": "m", "max_queued_requests": 7}),
        "unload": lambda manage: manage.unload("m"),
        "unload_all": lambda manage: manage.unload_all(),
    }
    async with service_with() as service, trio.open_nursery() as nursery:
        engine.step_gate.shut()
        user = Caller(nursery, use, service)
        await engine.step_gate.arrived()
        caller = Caller(nursery, calls[operation], service.management)
        while service.registry.get("m")._gate.statistics().waiting_managers == 0:
            await trio.lowlevel.checkpoint()
        service.hurry()
        report = await service.drain()
        assert (report.cancelled, report.complete) == (2, False)
        assert isinstance(caller.error, ShuttingDownError)
        assert isinstance(user.error, ShuttingDownError)
        assert service.registry.get("m").config.max_queued_requests is None
        engine.step_gate.open()


async def test_operations_count_by_their_ends(service_with, make_model_file, engine, inspect_gate):
    async with service_with() as service, trio.open_nursery() as nursery:
        await service.management.load({"id": "m"})
        engine.failing_loads = 1
        with pytest.raises(ModelLoadError):
            await service.management.load({"id": "new", "path": str(make_model_file("new.gguf"))})
        inspect_gate.shut()
        caller = Caller(nursery, service.management.load, {"id": "other"})
        await inspect_gate.arrived(3)
        assert service.tally().active == 1
        with pytest.raises(ServerBusyError):
            await service.management.unload("other", busy_timeout_ms=0)
        caller.scope.cancel()
        inspect_gate.open()
        while not caller.ended:
            await trio.lowlevel.checkpoint()
        tally = service.tally()
        assert (tally.active, tally.finished, tally.failed, tally.rejected, tally.cancelled) == (0, 1, 1, 1, 1)


async def test_no_model_leaves_for_want_of_use_while_the_service_drains(
    service_for, make_model_file, engine, mock_clock
):
    models = [ModelConfig(path=make_model_file(f"{name}.gguf"), lazy=True) for name in ("m", "other")]
    async with service_for(*models, idle_unload_ms=5_000) as service:
        async with trio.open_nursery() as nursery:
            await use(service, "other")
            engine.step_gate.shut()
            Caller(nursery, use, service)
            await engine.step_gate.arrived(4)
            nursery.start_soon(service.drain)
            await wait_all_tasks_blocked()
            mock_clock.jump(10)
            await wait_all_tasks_blocked()
            assert [status.state for status in service.models()] == [READY, READY]
            engine.step_gate.open()
        assert engine.closed == []


async def test_a_load_under_way_at_the_end_is_given_up(service_with, engine):
    async with trio.open_nursery() as nursery, service_with() as service:
        engine.load_gate.shut()
        caller = Caller(nursery, service.management.load, {"id": "m"})
        await engine.load_gate.arrived()
        nursery.start_soon(_open_when_settled, engine.load_gate)
    assert isinstance(caller.error, ShuttingDownError)
    assert engine.closed == []


async def test_a_trial_under_way_at_the_end_is_given_up(service_with, make_model_file, engine):
    async with trio.open_nursery() as nursery, service_with() as service:
        await use(service)
        engine.load_gate.shut()
        caller = Caller(nursery, service.management.load, {"id": "m", "path": str(make_model_file("new.gguf"))})
        await engine.load_gate.arrived(2)
        nursery.start_soon(_open_when_settled, engine.load_gate)
    assert isinstance(caller.error, ShuttingDownError)
    assert engine.closed == ["m[0]", "m"]


async def _open_when_settled(gate):
    await wait_all_tasks_blocked()
    gate.open()
