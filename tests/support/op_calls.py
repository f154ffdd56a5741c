"""Records the operands of an op's calls."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OpCalls(TorchDispatchMode):
    """Collects in `seen`, while it is entered, the operands of each call of one op."""

    def __init__(self, op: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op, self.seen = op, list[tuple[Any, ...]]()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if op is self.op:
            self.seen.append(args)
        return op(*args, **(kwargs or {}))
