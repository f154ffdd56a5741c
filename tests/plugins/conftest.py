"""What the tests of kernels in Triton's interpreter share."""

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(scope="module")
def bfloat16_products() -> Iterator[None]:
    """Multiply in fp32: Triton 3.9's interpreter multiplies the bit patterns of bfloat16."""
    import triton
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def wide(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if x.dtype.scalar != triton.language.bfloat16:
            return x
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), triton.language.float32)

    def dot(self, a, b, d, *rest):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN002, ANN202
        return plain(self, wide(a), wide(b), d, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield
