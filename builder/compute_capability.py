"""Which GPUs an engine is compiled for: `--compute-capability sm89,sm120` -> ("8.9", "12.0")."""

import re

from mtpbuild.runtime.errors import MtpbuildError, UsageError

# GPUs that TensorRT-RTX compiles fp32 programs for. (It knows sm75, but no fp32 product there.)
RTX = {"8.0": "sm80", "8.6": "sm86", "8.9": "sm89", "12.0": "sm120", "12.1": "sm121"}
FLAG = "--compute-capability"
ASSUMED = "10.0"  # where no GPU is needed: graphs and sizes are the same for all


def compute_capabilities(
    target: str, asked: tuple[str, ...], *, compiles: bool = True
) -> tuple[str, ...]:
    """In rising order; `asked` as on the command line, sm120 or 12.0. Raises UsageError.

    Target tensorrt compiles on the GPU that the engine is for; EngineError if there is none.
    """
    if target == "tensorrt" and not asked:
        from mtpbuild.runtime.programs.cuda import Device

        try:
            return (Device(target).compute_capability,)
        except MtpbuildError:
            if compiles:
                raise
            return (ASSUMED,)
    if target != "tensorrt-rtx":
        if asked:
            raise UsageError(f"{FLAG} is for target tensorrt-rtx, not {target}")
        return ()
    known = ", ".join(RTX.values())
    if not asked:
        raise UsageError(f"target tensorrt-rtx needs {FLAG}: of {known} those of your GPUs")
    found = {_dotted(text) for text in asked}
    for text in asked:
        if _dotted(text) not in RTX:
            raise UsageError(
                f"{FLAG} {text}: TensorRT-RTX engines are for RTX GPUs, not for data-centre GPUs "
                f"such as Hopper; supported: {known}"
            )
    return tuple(sorted(found, key=lambda text: tuple(map(int, text.split(".")))))


def compiling_gpu(target: str, device: str) -> str | None:
    """What `--device` asks for: compute capability of this machine's GPU, such as 9.0; cpu: None.

    Raises UsageError, EngineError if there is no GPU.
    """
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device} is unknown; supported: cpu, cuda")
    if device == "cpu":
        return None
    if target != "inductor":
        raise UsageError(f"--device cuda is for target inductor, not {target}")
    from mtpbuild.runtime.programs.torch_cuda import Gpu

    return Gpu().compute_capability


def _dotted(text: str) -> str:
    """sm120 -> 12.0; what is no such name stays as it is."""
    name = re.fullmatch(r"sm_?(\d+)(\d)", text.strip().lower())
    return f"{name[1]}.{name[2]}" if name else text.strip()
