"""Manifests, shared by the command's tests."""

from collections.abc import Callable
from typing import Any

import pytest
from ullage_testing.manifests import minimal_manifest, stored_manifest


@pytest.fixture
def manifest() -> Callable[..., dict[str, Any]]:
    """Return the function that makes a minimal manifest; keywords add fields to its spec."""
    return minimal_manifest


@pytest.fixture
def stored() -> Callable[..., dict[str, Any]]:
    """Return the function that makes a manifest with its defaults, as an API server stores it."""
    return stored_manifest
