"""Token-in requests with one thing wrong. Each says what a right answer to it is."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping

import msgspec

from benchmarks.hostile_payloads import PAYLOADS
from benchmarks.hostile_target import SAMPLING, Attempt, Body, Must, Mutation, Target

_ROUTES = ("/generate", "/inference/v1/generate")


def _token_in(change: Callable[[random.Random, Body], None], must: Must = "be refused") -> Mutation:
    """Changes the token-in request itself, for either route, streaming or not."""

    def mutate(name: str, rng: random.Random, target: Target) -> Attempt:
        body = target.good()
        change(rng, body)
        body["stream"] = rng.random() < 0.3
        return Attempt(name, rng.choice(_ROUTES), msgspec.json.encode(body), must)

    return mutate


def _payload(name: str) -> Mutation:
    """Changes what stands inside the item's payload. A grid turned round makes another picture, of as many rows."""

    def change(rng: random.Random, body: Body) -> None:
        body["features"]["mm_metadata"] = None
        data = body["features"]["kwargs_data"]["image"]
        data[0] = PAYLOADS[name](rng, data[0])
        body["features"]["mm_hashes"]["image"] = [f"own-{rng.random()}"]

    return _token_in(change, "be refused or served" if name == "grid transposed" else "be refused")


def _referenced(change: Callable[[random.Random, Target, Body], None], must: Must = "be refused") -> Mutation:
    """Changes a request that names its item by metadata and a genuine reference.

    The item is the tenant's own, so that a request which lost its reference is still served where prefill holds it.
    """

    def mutate(name: str, rng: random.Random, target: Target) -> Attempt:
        body = target.good()
        body["features"]["kwargs_data"] = None
        body["ec_transfer_params"] = copy.deepcopy(target.references)
        body["features"]["mm_hashes"]["image"] = list(target.references)
        change(rng, target, body)
        return Attempt(name, rng.choice(_ROUTES), msgspec.json.encode(body), must)

    return mutate


def _place(body: Body) -> dict[str, int]:
    place: dict[str, int] = body["features"]["mm_placeholders"]["image"][0]
    return place


def _longer(rng: random.Random, body: Body) -> None:
    _place(body)["length"] += rng.choice([1, 2, 500, 2**31, 2**63])


def _shorter(rng: random.Random, body: Body) -> None:
    _place(body)["length"] -= rng.randint(1, _place(body)["length"] + 1)


def _shifted(rng: random.Random, body: Body) -> None:
    _place(body)["offset"] += rng.choice([-1, 1, -500, 10_000])


def _twice(rng: random.Random, body: Body) -> None:
    """Two items in one place; or in two overlapping ones."""
    features = body["features"]
    for key in ("mm_hashes", "mm_placeholders", "kwargs_data", "mm_metadata"):
        if features.get(key):
            features[key]["image"] = [copy.deepcopy(features[key]["image"][0]) for _ in range(2)]
    _place(body)["offset"] += rng.choice([0, 1])


def _ten_thousand(rng: random.Random, body: Body) -> None:
    features = body["features"]
    place = _place(body)
    features["mm_hashes"]["image"] = [f"i{n}" for n in range(10_000)]
    features["mm_placeholders"]["image"] = [{"offset": place["offset"], "length": 1}] * 10_000
    features["kwargs_data"] = features["mm_metadata"] = None


def _counts_differ(rng: random.Random, body: Body) -> None:
    key = rng.choice(["mm_hashes", "mm_placeholders", "kwargs_data"])
    items = body["features"][key]["image"]
    body["features"][key]["image"] = rng.choice([[], items * 3])


def _modality(rng: random.Random, body: Body) -> None:
    other = rng.choice(["video", "audio", "image ", "", "\u0000"])
    features = body["features"]
    for key in ("mm_hashes", "mm_placeholders", "kwargs_data", "mm_metadata"):
        if features.get(key) and (key != "mm_metadata" or rng.random() < 0.5):
            features[key] = {other: features[key]["image"]}


def _truncated(rng: random.Random, body: Body) -> None:
    data = body["features"]["kwargs_data"]["image"][0]
    body["features"]["kwargs_data"]["image"][0] = data[: rng.randrange(len(data) - 8)]


def _not_base64(rng: random.Random, body: Body) -> None:
    """One of them is an empty item: the tenant's own picture by its name alone."""
    body["features"]["kwargs_data"]["image"][0] = rng.choice(["", "%%%", "é" * 40, "AAAA" * 50, "gA==", "kA=="])


def _layout_only(rng: random.Random, body: Body) -> None:
    body["features"]["kwargs_data"] = body["features"]["mm_metadata"] = None
    name = rng.choice(["deadbeef" * 8, f"x{rng.random()}", "../../etc", "\u0000", "🙂", "", "item-00-00"])
    body["features"]["mm_hashes"]["image"] = [name]


def _bad_metadata(rng: random.Random, body: Body) -> None:
    body["features"]["kwargs_data"] = None
    body["features"]["mm_metadata"] = {
        "image": [rng.choice(["", "AAAA", "%%%", "gA==", {"image_grid_thw": [1, 2, 3]}])]
    }


def _forged(rng: random.Random, target: Target, body: Body) -> None:
    (name,) = target.references
    body["ec_transfer_params"] = {
        name: {
            "ref": {
                "identifier": rng.choice([name, "other"]),
                "peer": rng.choice(["tcp://127.0.0.1:22", "tcp://169.254.169.254:80", "file:///etc/passwd", "tcp://["]),
                "epoch": "e",
                "offset": rng.choice([0, -1, 2**63, None]),
                "generation": rng.choice([1, -5]),
                "shape": rng.choice([[4, 128], [-1, 0], [2**40, 2**40]]),
                "dtype": "bfloat16",
                "size_bytes": rng.choice([1024, 2**62, -1]),
                "digest": rng.choice([1, 2**64 - 1]),
                "expires_at": 4e9,
                "mac": rng.choice(["", "00" * 32, "é"]),
            }
        }
    }


def _altered(rng: random.Random, target: Target, body: Body) -> None:
    """A genuine reference with one field changed: its MAC no longer covers it, so there is none."""
    ((_, entry),) = body["ec_transfer_params"].items()
    ref = entry["ref"]
    field = rng.choice(sorted(ref))
    value = ref[field]
    match value:
        case str():
            ref[field] = rng.choice([value + "0", "", "tcp://127.0.0.1:1", value[::-1] + "x"])
        case int() | float():
            ref[field] = rng.choice([value + 1, 0 if value else 7, -1, 2**70, 1e300])
        case list():
            ref[field] = rng.choice([[], [*value, 1], [1, 1], [2**62, 2]])
        case _:
            ref[field] = rng.choice([{}, [None], "x"])


def _swapped(rng: random.Random, target: Target, body: Body) -> None:
    """A genuine reference to another picture, under this item's name."""
    ((_, other),) = target.others.items()
    (name,) = target.references
    body["ec_transfer_params"] = {name: other}


def _expired(rng: random.Random, target: Target, body: Body) -> None:
    """An expiry in the past or in a better future. Either way no server has signed it."""
    ((_, entry),) = body["ec_transfer_params"].items()
    entry["ref"]["expires_at"] = rng.choice([0, 1.5, -1, entry["ref"]["expires_at"] + 1e6])


def _salted(rng: random.Random, target: Target, body: Body) -> None:
    """A genuine reference of another tenant's."""
    body["cache_salt"] = f"tenant-{rng.random()}"


def _reference_only(rng: random.Random, target: Target, body: Body) -> None:
    body["features"]["mm_metadata"] = None


def _transposed_metadata(rng: random.Random, target: Target, body: Body) -> None:
    data = body["features"]["mm_metadata"]["image"]
    data[0] = PAYLOADS["grid transposed"](rng, data[0])


def _unused_reference(rng: random.Random, target: Target, body: Body) -> None:
    body["ec_transfer_params"] |= target.others


def _genuine(rng: random.Random, target: Target, body: Body) -> None:
    """Nothing wrong, but for what may lapse with time."""


def _stray_ec(rng: random.Random, body: Body) -> None:
    body["features"]["kwargs_data"] = None
    body["ec_transfer_params"] = rng.choice(
        [{"x": 1}, {"x": {"ref": 1}}, {"x": {"peer_host": "h"}}, {"x": {}}, [], "x", {"": None}, 1]
    )


def _kv(rng: random.Random, body: Body) -> None:
    params = rng.choice([{"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}, {"a": 1}, {}])
    if rng.random() < 0.5:
        body["kv_transfer_params"] = params
    else:
        body["sampling_params"] = {**SAMPLING, "extra_args": {"kv_transfer_params": params}}


def _bad_tokens(rng: random.Random, body: Body) -> None:
    body["token_ids"] = rng.choice([[], [-1], [10**9], body["token_ids"] * 60, ["a"], None, [2**70], {}, "abc"])


def _moved_tokens(rng: random.Random, body: Body) -> None:
    """The prompt shifts under the ranges, or the range's tokens are others."""
    tokens, place = list(body["token_ids"]), _place(body)
    if rng.random() < 0.5:
        tokens.insert(0, tokens[0])
    else:
        tokens[place["offset"] + rng.randrange(place["length"])] = 1
    body["token_ids"] = tokens


def _bad_sampling(rng: random.Random, body: Body) -> None:
    """vLLM's own route skips names that it does not know."""
    wrong: Body = rng.choice(
        [{"temperature": -1}, {"max_tokens": 0}, {"max_tokens": 10**6}, {"top_p": 2}, {"n": 0}, {"nonsense": 1},
         {"logprobs": 10**6}, {"stop": [1]}, {"structured_outputs": {"regex": "("}}, {"temperature": "hot"},
         {"structured_outputs": {"json": "{"}}, {"logit_bias": {"99999999": 1}}, {"seed": "x"}, {"min_tokens": 99},
         {"allowed_token_ids": []}, {"allowed_token_ids": [10**9]}, {"bad_words": [""]}, {"stop_token_ids": ["x"]}]
    )  # fmt: skip
    body["sampling_params"] = {**SAMPLING, **wrong}


def _foreign(name: str, rng: random.Random, target: Target) -> Attempt:
    return Attempt(name, rng.choice(_ROUTES), msgspec.json.encode(target.foreign), "be refused")


def _same_id(name: str, rng: random.Random, target: Target) -> Attempt:
    """The same id twice at once: one is refused with 409, or both are right."""
    body = {**target.good(), "request_id": f"same-{rng.random()}"}
    return Attempt(name, "/generate", msgspec.json.encode(body), "give the known tokens", copies=3)


def _broken_json(name: str, rng: random.Random, target: Target) -> Attempt:
    body = msgspec.json.encode(target.base)
    cut = rng.choice([body[: rng.randrange(len(body))], b"", b"\xff\xfe", b"[" * 100_000, b"null", b'"x"', b"NaN"])
    return Attempt(name, rng.choice([*_ROUTES, "/v1/chat/completions"]), cut, "be refused")


TOKEN_MUTATIONS: Mapping[str, Mutation] = {
    "range longer": _token_in(_longer),
    "range shorter": _token_in(_shorter),
    "range shifted": _token_in(_shifted),
    "range twice": _token_in(_twice),
    "10,000 items": _token_in(_ten_thousand),
    "counts differ": _token_in(_counts_differ),
    "other modality": _token_in(_modality),
    "payload truncated": _token_in(_truncated),
    "payload not base64": _token_in(_not_base64, "give the known tokens"),
    "layout only": _token_in(_layout_only),
    "metadata malformed": _token_in(_bad_metadata, "give the known tokens"),
    "tokens moved": _token_in(_moved_tokens),
    "token ids": _token_in(_bad_tokens),
    "sampling": _token_in(_bad_sampling, "give the known tokens"),
    "stray ec_transfer_params": _token_in(_stray_ec),
    "kv_transfer_params": _token_in(_kv),
    "reference genuine": _referenced(_genuine, "give the known tokens"),
    "reference forged": _referenced(_forged, "give the known tokens"),
    "reference altered": _referenced(_altered, "give the known tokens"),
    "reference swapped": _referenced(_swapped, "give the known tokens"),
    "reference expired": _referenced(_expired, "give the known tokens"),
    "reference of another tenant": _referenced(_salted),
    "reference without metadata": _referenced(_reference_only, "give the known tokens"),
    "reference and another grid": _referenced(_transposed_metadata),
    "reference unused": _referenced(_unused_reference),
    "another tenant's name": _foreign,
    "same request id": _same_id,
    "broken JSON": _broken_json,
    **{f"payload: {name}": _payload(name) for name in PAYLOADS},
}
