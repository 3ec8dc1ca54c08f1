"""Profiles as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pipe.partition.profile import LayerProfile, Profile

LAYERS = (
    LayerProfile("model.0", 0.1, 0.25, 1, 2, 3, 4, 5, 0.01, 0.02),
    LayerProfile("model.1", 1 / 3, 2 / 3, 10, 20, 30, 40, 50),
)
PROFILE = Profile(LAYERS, 16, 64, "cuda:0", 128)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == PROFILE


def test_estimated() -> None:
    profile = Profile.estimated([1, 2.5], batch_size=4)
    assert [layer.forward_seconds for layer in profile.layers] == [1.0, 2.5]
    assert [layer.backward_seconds for layer in profile.layers] == [2.0, 5.0]
    assert {layer.parameter_bytes + layer.activation_bytes for layer in profile.layers} == {0}
    assert (profile.batch_size, profile.input_bytes) == (4, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "its version is not 1"),
        ({"version": None}, "version"),
        ({"layers": None}, "layers"),
        ({"layers": [{"name": "a"}]}, "forward_seconds"),
        ({"layers": [{"nome": "a"}]}, "nome"),
        ({"sice": 3}, "unknown entries \\['sice'\\]"),
        ({"batch_size": None}, "batch_size"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    content = json.loads(path.read_text()) | change
    content = {name: value for name, value in content.items() if value is not None}
    path.write_text(json.dumps(content))
    with pytest.raises(MisconfigurationException, match=f"(?s)profile.json is not.*{says}"):
        Profile.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(MisconfigurationException, match="other.json is not a profile"):
        Profile.load(path)
