"""SamplingParams: every bad value is refused by name."""

import dataclasses
import math

import pytest

from leadline.config.sampling import SamplingParams
from leadline.errors import SamplingError

pytestmark = pytest.mark.unit

BAD = [
    ("n", 0), ("n", 129), ("n", 1.0), ("n", True), ("n", None),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
    ("temperature", 10**400),
    ("top_p", 0), ("top_p", 1.01), ("top_p", math.nan), ("top_p", None),
    ("top_k", -2), ("top_k", 1.5), ("top_k", False),
    ("min_p", -0.01), ("min_p", 1.1), ("min_p", math.nan),
    ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.0), ("seed", "a"),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2.0),
    ("min_tokens", -1), ("min_tokens", 201),
    ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", None), ("stop", ["a"] * 65),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", [True]), ("stop_token_ids", 3),
    ("logprobs", -1), ("logprobs", True),
    ("ignore_eos", 1), ("include_stop_str_in_output", "yes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value!r:.12}" for name, value in BAD])
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name}: expected ")


def test_every_field_has_a_bad_value():
    assert {name for name, _ in BAD} == {field.name for field in dataclasses.fields(SamplingParams)}


def test_good_values():
    params = SamplingParams(stop="x", stop_token_ids=[3, 4], seed=-(2**63), top_k=-1, temperature=0, max_tokens=None)
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    assert SamplingParams(min_tokens=9, max_tokens=9).min_tokens == 9


def test_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2
    with pytest.raises(TypeError):
        SamplingParams(1)
