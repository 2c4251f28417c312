"""A compiler of one's own, for tests that fill or break it."""

from __future__ import annotations

import pytest
from tests.pure.structured.bytewise import byte_vocabulary

from tokenmill.structured.compile import Compiler


@pytest.fixture
def compiler():
    made = Compiler(byte_vocabulary)
    yield made
    made.close()
