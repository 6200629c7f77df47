"""LoRA adapters of models: who gets them, which files a load may name, and what a refusal leaves."""

import pytest
from tiny_adapters import tiny_adapter
from tiny_models import tiny_model

from trioserve.config import LoraAdapter, ModelConfig
from trioserve.engine.base import Adapter
from trioserve.engine.gguf import read_header
from trioserve.engine.llama import LlamaEngine
from trioserve.errors import InvalidModelError, InvalidRequestError
from trioserve.runtime.loader import inspect
from trioserve.runtime.pool import memory_needed
from trioserve.service.requests import BatchRequest, GenerationRequest, TextPrompt


@pytest.fixture
def adapter(make_model_file):
    return make_model_file("style.gguf")


@pytest.fixture
def service_with(service_for, make_model_file, tmp_path):
    """A service with the lazy model ``m``, and the folder of its file as a root."""

    def open_one(**settings):
        return service_for(
            ModelConfig(path=make_model_file("m.gguf"), id="m", lazy=True, **settings),
            management=True,
            model_roots=(tmp_path,),
        )

    return open_one


async def use(service):
    async with service.generate(GenerationRequest(TextPrompt("prompt"), model="m", max_tokens=3)) as generation:
        assert [part async for part in generation]


def adapters(service):
    """Those of the session that was made last."""
    return service.registry.get("m").pool.weights.sessions[-1].options.adapters


async def test_every_session_of_a_model_has_its_adapters(service_with, engine, adapter):
    async with service_with(slots=2, lora=[f"{adapter}:0.5"], batch_capacity=4) as service:
        await use(service)
        items = [GenerationRequest(TextPrompt(text), model="m", max_tokens=2) for text in "abc"]
        async with service.generate(BatchRequest(items, "m")) as generation:
            assert [part async for part in generation]
        engine.failing_proofs = 2  # a session that does not prove itself is replaced
        await use(service)
        await use(service)
        found = service.registry.get("m").pool.weights.sessions
        assert [session.max_sequences for session in found] == [1, 1, 3, 1]
        assert {session.options.adapters for session in found} == {(Adapter(adapter, 0.5),)}


async def test_a_load_gives_a_model_adapters_and_takes_them_away(service_with, engine, adapter):
    async with service_with() as service:

        async def load(**settings):
            await service.management.load({"id": "m", **settings})
            return service.registry.get("m").config.lora

        assert await load() == ()
        assert await load(lora=[f"{adapter}:2"]) == (LoraAdapter(adapter, 2.0),)
        assert adapters(service) == (Adapter(adapter, 2.0),)
        assert await load(slots=2) == (LoraAdapter(adapter, 2.0),)
        assert await load(lora=None) == (LoraAdapter(adapter, 2.0),)
        loads = engine.loads
        assert await load(lora=[{"path": str(adapter), "scale": 2}]) == (LoraAdapter(adapter, 2.0),)
        assert engine.loads == loads  # it is what it was
        assert await load(lora=[]) == ()
        assert adapters(service) == ()


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (["none.gguf"], "lora: adapter file 'PLACEnone.gguf' cannot be read: No such file"),
        (["notes.gguf"], "lora: adapter file 'PLACEnotes.gguf' is not a GGUF file"),
        (["refused.gguf:0.5"], "lora: the fake was told to refuse an adapter"),
        (["style.gguf:nan"], "lora: the scale of 'PLACEstyle.gguf' is nan"),
        ("style.gguf", "is not a list of adapters"),
    ],
    ids=str,
)
async def test_an_adapter_that_is_refused_changes_nothing(service_with, engine, adapter, make_model_file, lora, said):
    folder = adapter.parent
    (folder / "notes.gguf").write_text("notes")
    engine.refused = make_model_file("refused.gguf").name
    named = [f"{folder}/{item}" for item in lora] if isinstance(lora, list) else lora
    async with service_with(lora=[str(adapter)]) as service:
        await use(service)
        model = service.registry.get("m")
        pool, config = model.pool, model.config
        with pytest.raises((InvalidRequestError, InvalidModelError)) as caught:
            await service.management.load({"id": "m", "lora": named})
        assert said.replace("PLACE", f"{folder}/") in caught.value.message
        assert (caught.value.param, caught.value.status) == ("lora", 400)
        assert (model.pool, model.config, engine.loads) == (pool, config, 1)
        with pytest.raises((InvalidRequestError, InvalidModelError)):
            await service.management.load({"id": "new", "path": str(config.path), "lora": named})
        assert [status.id for status in service.models()] == ["m"]


async def test_adapters_outside_of_the_roots_are_refused_whether_they_exist_or_not(service_with, adapter, tmp_path):
    outside = tmp_path.parent / f"{tmp_path.name}-secret.gguf"
    outside.write_bytes(adapter.read_bytes())
    (tmp_path / "link.gguf").symlink_to(outside)
    async with service_with() as service:
        said = set()
        for name in (str(outside), f"{outside}.none", f"{tmp_path}/link.gguf", f"{tmp_path}/../{outside.name}"):
            with pytest.raises(InvalidRequestError) as caught:
                await service.management.load({"id": "m", "lora": [str(adapter), f"{name}:0.5"]})
            assert caught.value.param == "lora"
            said.add(caught.value.message.replace(repr(name), "NAME"))
        assert said == {"lora: NAME is not below a folder that requests may load from (model_roots)"}


async def test_links_to_adapters_are_followed_once(service_with, adapter, make_model_file):
    link = adapter.with_name("current.gguf")
    link.symlink_to(adapter)
    async with service_with() as service:
        await service.management.load({"id": "m", "lora": [f"{link}:0.5"]})
        assert service.registry.get("m").config.lora == (LoraAdapter(adapter, 0.5),)


async def test_without_roots_only_adapters_in_use_can_be_named(service_for, make_model_file, adapter):
    path, other = make_model_file("m.gguf"), make_model_file("other.gguf")
    model = ModelConfig(path=path, id="m", lazy=True, lora=[str(adapter)])
    async with service_for(model, management=True) as service:
        await service.management.load({"id": "twin", "path": str(path), "lora": [f"{adapter}:3"]})
        assert service.registry.get("twin").config.lora == (LoraAdapter(adapter, 3.0),)
        for setting, name in (("lora", other), ("lora", path), ("path", adapter)):
            value = [str(name)] if setting == "lora" else str(name)
            with pytest.raises(InvalidRequestError, match="model_roots") as caught:
                await service.management.load({"id": "new", "path": str(path), setting: value})
            assert caught.value.param == setting


async def test_an_adapter_counts_also_where_the_weights_are_there_already():
    class Cache:
        def __init__(self, has):
            self.has = lambda path, options: has

    base = tiny_model()
    adapter = tiny_adapter(base)
    plain, tuned = ModelConfig(path=base), ModelConfig(path=base, lora=[str(adapter)])
    file = await inspect(LlamaEngine(), tuned)
    for has in (False, True):
        added = memory_needed(tuned, file, Cache(has), 1) - memory_needed(plain, file, Cache(has), 1)
        assert added.host == read_header(adapter).weights_size
