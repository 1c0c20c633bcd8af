"""Random requests made from the server's own OpenAPI schema: none of them may be the server's fault."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

from leadline.server.app import create_app
from leadline.server.service import Service
from leadline.server.settings import ServerSettings
from tests.server.serving import fake_model, plain_parts, released_parts
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.unit


def _app(parts: Any) -> Any:
    """An application whose model is there from the start; names are not checked, so that requests get further."""
    tokenizer, vision = parts
    service = Service(ServerSettings(image_urls=False), lambda progress: fake_model(FakeEngine(tokenizer), vision))
    service.model = fake_model(FakeEngine(tokenizer), vision)

    async def stay(drain_seconds: float) -> None:
        """The transport starts and stops the application around every request."""

    service.start, service.stop = lambda: None, stay  # type: ignore[method-assign]
    service.check_model_name = lambda name: name or "x"  # type: ignore[method-assign]
    return create_app(service)


_SETTINGS = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
)
released = schemathesis.openapi.from_asgi("/openapi.json", _app(released_parts()))
plain = schemathesis.openapi.from_asgi("/openapi.json", _app(plain_parts()))


@released.parametrize()
@_SETTINGS
def test_no_server_errors(case: Any) -> None:
    case.call_and_validate(checks=[not_a_server_error])


@plain.parametrize()
@_SETTINGS
def test_no_server_errors_with_a_small_vocabulary(case: Any) -> None:
    case.call_and_validate(checks=[not_a_server_error])
