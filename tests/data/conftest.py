"""No test reads data of the machine that it runs on."""

import pytest


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEANBAYES_DATA", raising=False)
