import json
from typing import Any

import httpx
import msgspec
import pytest

from serving.errors import MultiModalCacheMiss
from serving.naming import ItemNames
from serving.protocol import Feature, ItemProvenance, Metadata, Placeholder, Tensors
from serving.stages import Report, ReportedItem
from tests.fakes import ref_for
from tests.unit.serving.front_fakes import FakePipeline, data_url, genuine

PLACE = Placeholder(0, 1)
ONE, OTHER = (Tensors((b"frame", bytes([n])), {"grid": [n]}, {}) for n in (1, 2))


def named(name: str, payload: Tensors | Metadata | None = ONE) -> Feature:
    return Feature("image", name, PLACE, payload)


async def internal(names: ItemNames, feature: Feature, salt: str | None = None, **options: Any) -> str:
    renamed = await names.rename([feature], salt, **{"client_named": True, "refs": {}, **options})
    return renamed.features[0].identifier


async def test_a_clients_name_is_never_the_internal_one() -> None:
    names = ItemNames("m", genuine)
    assert await internal(names, named("cat")) != "cat"
    assert await internal(names, named("cat")) == await internal(ItemNames("m", genuine), named("cat"))


async def test_other_content_other_tenant_other_model_other_name() -> None:
    names = ItemNames("m", genuine)
    found = {
        await internal(names, named("cat")),
        await internal(names, named("cat", OTHER)),
        await internal(names, named("dog")),
        await internal(names, named("cat"), "tenant"),
        await internal(ItemNames("n", genuine), named("cat")),
    }
    assert len(found) == 5


async def test_a_name_alone_means_what_the_tenant_last_sent_under_it() -> None:
    names = ItemNames("m", genuine)
    await internal(names, named("cat"), "tenant")
    latest = await internal(names, named("cat", OTHER), "tenant")
    assert await internal(names, named("cat", None), "tenant") == latest
    assert await internal(names, named("cat", Metadata({})), "tenant") == latest
    assert await internal(names, named("cat", None), "another") not in (latest, "cat")
    assert await internal(names, named(latest, None), "tenant") == latest


async def test_an_internal_name_of_this_very_payload_stays() -> None:
    names = ItemNames("m", genuine)
    first = await internal(names, named("cat"))
    assert await internal(names, named(first)) == first
    assert await internal(names, named(first, OTHER)) != first


async def test_what_our_renderer_named_stays_and_can_be_named_alone() -> None:
    names = ItemNames("m", genuine)
    assert await internal(names, named("hash"), client_named=False) == "hash"
    assert await internal(names, named("hash", None)) == "hash"
    assert await internal(names, named("hash2", Metadata({})), client_named=False) == "hash2"
    assert await internal(names, named("hash2", None)) != "hash2"


async def test_a_genuine_reference_opens_an_internal_name() -> None:
    item, refs = named("item-x", Metadata({})), {"item-x": ref_for("item-x")}
    assert await internal(ItemNames("m", genuine), item, refs=refs) == "item-x"
    strict = ItemNames("m", lambda ref, cache_salt: cache_salt == "mine")
    assert await internal(strict, item, "mine", refs=refs) == "item-x"
    assert await internal(strict, item, "yours", refs=refs) != "item-x"
    assert await internal(strict, item, "mine", refs={"item-x": None}) != "item-x"


async def test_references_follow_the_names() -> None:
    """A reference under a name that the client gave itself is none; one for an absent item stays for admission."""
    ref = ref_for("cat")
    renamed = await ItemNames("m", genuine).rename([named("cat")], None, client_named=True, refs={"cat": ref})
    (feature,) = renamed.features
    assert renamed.refs({"cat": ref, "dog": ref, "cow": None}) == {feature.identifier: None, "dog": ref, "cow": None}


async def test_clients_are_told_their_own_names() -> None:
    renamed = await ItemNames("m", genuine).rename([named("cat")], None, client_named=True, refs={})
    name = renamed.features[0].identifier
    report = Report((ReportedItem(name, "image", ItemProvenance.ENCODED),), 0.0, 0.0, 0.0, 0, None)
    assert renamed.report(report).items[0].identifier == "cat"
    told = renamed.error(MultiModalCacheMiss("gone", param="features.image[0]", hashes=[name], retry_after_s=1.0))
    assert (type(told), told.hashes, told.param, told.retry_after_s) == (
        MultiModalCacheMiss,
        ("cat",),
        "features.image[0]",
        1.0,
    )


def rename(names: ItemNames, *parts: dict[str, Any], **fields: Any) -> list[Any]:
    body = {"messages": [{"role": "user", "content": list(parts)}], **fields}
    return [
        part["uuid"] for part in json.loads(names.rename_uuids(json.dumps(body).encode()))["messages"][0]["content"]
    ]


def picture(url: str | None, uuid: Any, kind: str = "image_url") -> dict[str, Any]:
    return {"type": kind, "image_url": None if url is None else {"url": url}, "uuid": uuid}


def test_uuids_hold_tenant_name_and_content() -> None:
    names = ItemNames("m", genuine)
    ids = [
        *rename(names, picture(data_url(1), "cat"), picture(data_url(2), "cat"), picture(data_url(1), 7)),
        *rename(names, picture(data_url(1), "cat"), cache_salt="tenant"),
    ]
    assert len(set(ids)) == 4
    assert not {"cat", "7"} & set(ids)
    assert rename(names, picture(data_url(1), "cat")) == ids[:1]


def test_a_uuid_alone_means_the_tenants_latest() -> None:
    names = ItemNames("m", genuine)
    (sent,) = rename(names, picture(data_url(1), "cat"), cache_salt="tenant")
    assert rename(names, picture(None, "cat"), cache_salt="tenant") == [sent]
    (unknown,) = rename(names, picture(None, "cat"), cache_salt="another")
    assert unknown not in (sent, "cat")


def test_what_is_behind_a_url_can_change() -> None:
    assert rename(ItemNames("m", genuine), picture("https://example.com/cat.png", "cat")) == [None]


def test_uuids_with_references_stay() -> None:
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": "x"}, "uuid": "item-x"}
    entry = {"ref": msgspec.to_builtins(ref_for("item-x"))}
    assert rename(ItemNames("m", genuine), part, ec_transfer_params={"item-x": entry}) == ["item-x"]
    assert rename(ItemNames("m", lambda ref, salt: False), part, ec_transfer_params={"item-x": entry}) != ["item-x"]
    for shape in (["item-x"], {"item-x": {"ref": {}}}, {"item-x": {}}):
        assert rename(ItemNames("m", genuine), part, ec_transfer_params=shape) != ["item-x"]


def test_uuids_of_other_things_stay() -> None:
    assert rename(ItemNames("m", genuine), {"type": "text", "text": "hi", "uuid": "mine"}) == ["mine"]


@pytest.mark.parametrize("body", [b'{"uuid" broken', b'["uuid"]', b'{"model":  "spaced"}', b'"uuid"'])
def test_other_bodies_are_not_touched(body: bytes) -> None:
    assert ItemNames("m", genuine).rename_uuids(body) == body


async def test_on_the_routes(http: httpx.AsyncClient, pipeline: FakePipeline) -> None:
    """A uuid that is the name of someone else's picture leads to neither that picture nor that name."""
    said = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(21)}}]}
    await http.post("/v1/chat/completions", json={"messages": [said]})
    victim = pipeline.requests[0].features[0].identifier
    said["content"] = [picture(data_url(22), victim)]
    response = await http.post("/v1/chat/completions", json={"messages": [said]})
    assert response.status_code == 200
    thief = pipeline.requests[1].features[0]
    assert thief.identifier != victim
    assert thief.payload != pipeline.requests[0].features[0].payload
    assert isinstance(pipeline.requests[0].features[0].payload, Tensors)


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/generate"])
async def test_token_in_names_on_the_routes(http: httpx.AsyncClient, pipeline: FakePipeline, path: str) -> None:
    said = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(23)}}]}
    prompt = (await http.post("/v1/chat/completions/render", json={"messages": [said]})).json()
    features = {**prompt["features"], "mm_hashes": {"image": ["mine"]}}
    sent = {"token_ids": prompt["token_ids"], "features": features, "sampling_params": {"max_tokens": 3}}
    response = await http.post(path, json=sent)
    assert response.status_code == 200
    name = pipeline.requests[0].features[0].identifier
    assert name.startswith("item-")
    assert response.headers["x-triptych-items"] == '"mine";modality=image;provenance=encoded'
    sent["features"] = {**features, "kwargs_data": None, "mm_metadata": None}
    await http.post(path, json=sent)
    assert pipeline.requests[1].features[0].identifier == name
    assert pipeline.requests[1].features[0].payload is None
    pipeline.error, pipeline.error_args = MultiModalCacheMiss, {"hashes": [name]}
    assert (await http.post(path, json=sent)).json()["error"]["hashes"] == ["mine"]
