"""What the parity tests share."""

from __future__ import annotations

import pytest
from published_model import missing


@pytest.fixture(scope="session")
def published() -> None:
    """The published code can be imported; tests that need it are skipped, with the reason, where it cannot."""
    reason = missing()
    if reason:
        pytest.skip(reason)
