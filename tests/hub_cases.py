"""A Hugging Face Hub in a folder, for tests without a network connection."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ME = "me"  # whose token is stored


def snapshot(cache: Path, repo_id: str) -> Path:
    """Where the library finds the files of a repository that it has downloaded."""
    return cache / f"models--{repo_id.replace('/', '--')}" / "snapshots" / COMMIT


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Uploads go to the cache of downloads, which the library reads offline. Calls must fit its real API."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def create_repo(repo_id: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"{ME}/{repo_id}")

    def upload_folder(*, repo_id: str, folder_path: Path, **_: Any) -> SimpleNamespace:
        place = snapshot(cache, repo_id)
        shutil.copytree(folder_path, place)
        refs = place.parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text(COMMIT)
        return SimpleNamespace(commit_url=f"https://example.org/{repo_id}/commit/{COMMIT}")

    api = create_autospec(huggingface_hub.HfApi)
    api.return_value.create_repo.side_effect = create_repo
    api.return_value.upload_folder.side_effect = upload_folder
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    return cache
