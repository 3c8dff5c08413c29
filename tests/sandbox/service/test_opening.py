"""A service is opened as a config says."""

from __future__ import annotations

import asyncio

import pytest
from services import scripted, serving

from strop.errors import UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.opening import open_service
from strop.sandbox.protocol import RunRequest

TOKEN = "correct horse battery"


def test_a_service_that_is_opened_without_its_token_says_where_to_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(scripted(), tokens={"trainer": TOKEN}) as server:
            config = SandboxConfig(url=server.url, token_env="THE_TOKEN")
            for wrong in ("", "wrong"):
                monkeypatch.setenv("THE_TOKEN", wrong)
                with pytest.raises(UserError, match=r"environment variable THE_TOKEN; `strop sandbox run` .* --token-file"):
                    async with open_service(config):
                        pass
            monkeypatch.setenv("THE_TOKEN", TOKEN)
            async with open_service(config) as service:
                assert (await service.run(RunRequest(code="1"))).text == "ran 1"

    asyncio.run(main())
