"""Keep the tests independent of data on this machine."""

import pytest


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEANBAYES_DATA", raising=False)
