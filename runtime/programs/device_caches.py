"""Latent caches in the memory of a device that onnxruntime manages."""

from collections.abc import Sequence
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.manifest import StateSpec
from mtpbuild.runtime.programs.host_slots import Caches


class DeviceCaches(Caches):
    """Keeps caches on the device; in the host's arrays slots are moved, else they hold nothing.

    Python's onnxruntime copies whole tensors between host and device, and nothing on the device.
    So a move takes all caches through the host; with one slot there is none, and with several it
    happens when a request ends before another one, or outgrows the layout.
    """

    def __init__(self, specs: Sequence[StateSpec], device: str) -> None:
        super().__init__(specs)
        self.device = device
        self._values: dict[str, Any] = {}
        try:
            for name, flat in self._flat.items():
                self._values[name] = ort.OrtValue.ortvalue_from_numpy(flat, device, 0)
        except Exception as error:  # onnxruntime raises its own C++ exception types
            size = sum(flat.nbytes for flat in self._flat.values()) / 1e6
            reason = str(error).splitlines()[0]
            raise EngineError(
                f"onnxruntime can't hold the caches, {size:,.0f} MB, on {device} ({reason}): "
                f"--provider {device} needs a GPU with its driver, and that much of its memory free"
            ) from None

    def pointers(self) -> dict[str, int]:
        return {name: value.data_ptr() for name, value in self._values.items()}

    def arrays(self) -> dict[str, NDArray[Any]]:
        self._download()
        return super().arrays()

    def move(self, source: int, target: int, lengths: NDArray[Any]) -> None:
        self._download()
        super().move(source, target, lengths)
        self._upload()

    def _reserve(self, rows: int) -> None:
        """The host's arrays are not what a step writes to."""

    def _lay_out(self, rows: int) -> None:
        self._download()
        super()._lay_out(rows)
        self._upload()

    def _download(self) -> None:
        for name, value in self._values.items():
            self._flat[name][:] = value.numpy()

    def _upload(self) -> None:
        for name, value in self._values.items():
            value.update_inplace(self._flat[name])
