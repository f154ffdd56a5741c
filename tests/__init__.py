"""The tests; helpers in support/ and reference/ say as much as a test when they fail."""

import pytest

pytest.register_assert_rewrite("tests.support", "tests.reference")
