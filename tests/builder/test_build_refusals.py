"""What `mtpbuild build` refuses in one line, before it reads weights or writes anything: flags."""

from pathlib import Path

import pytest

from mtpbuild.runtime.contract.manifest import MAX_BATCH, MAX_CHUNK, MAX_SEQ_LEN
from tests.support.families import make_family, save_family
from tests.support.invoke import refusal

CUDA = "--target inductor --device cuda"
RTX = "--target tensorrt-rtx --compute-capability"
SUPPORTED = "supported: onnxruntime"
# Flags, and what the line says.
REFUSED = [
    ("--nextn 16", "--nextn 16 is outside 0..15"),
    ("--nextn=-1", "--nextn -1 is outside 0..15"),
    ("--nextn 0,99", "--nextn 99 is outside 0..15"),
    ("--nextn 1,x", "--nextn '1,x' is not a list of numbers such as 0,1,2,3"),
    ("--nextn=", "--nextn '' is not a list of numbers such as 0,1,2,3"),
    ("--nextn 0 --drafter eagle", "--drafter eagle is unknown; supported: mtp-eagle, mtp-vanilla"),
    ("--nextn 3 --drafter mtp-vanilla", "--drafter mtp-vanilla needs 3 MTP modules for --nextn 3"),
    ("--nextn auto --drafter mtp-vanilla", "--nextn auto drafts by mtp-eagle"),
    ("--nextn auto --target inductor", "--nextn auto is for target onnxruntime, not inductor"),
    ("--target openvino", f"unknown target 'openvino'; {SUPPORTED}"),
    ("--max-batch 0", f"--max-batch 0 is outside 1..{MAX_BATCH}"),
    (f"--max-batch {10**9}", "--max-batch 1000000000 is outside"),
    ("--nextn 0 --max-seq-len 0", f"--max-seq-len 0 is outside 4..{MAX_SEQ_LEN}"),
    ("--nextn 3 --max-seq-len 6", "--max-seq-len 6 is outside 7.."),
    (f"--max-seq-len {10**20}", f"--max-seq-len {10**20} is outside"),
    ("--prefill-chunk 0", f"--prefill-chunk 0 is outside 1..{MAX_CHUNK}"),
    ("--draft-vocab 5 --nextn 0", "--draft-vocab is for engines that draft"),
    # What numbers are in
    ("--weights int5", "--weights int5 is unknown; supported: int8, int4, fp8, nvfp4"),
    ("--weights fp8", "--weights fp8: target onnxruntime keeps int8, int4; fp8 is for target in"),
    ("--weights int4 --target inductor", "--weights int4: target inductor keeps fp8, nvfp4; int4"),
    ("--weights int8 --target tensorrt-rtx", "--weights int8: target tensorrt-rtx keeps no quanti"),
    (
        "--weights fp8 --head-weights int8 --target inductor",
        "--head-weights int8: target inductor keeps fp8, nvfp4; int8 is for target onnxruntime",
    ),
    ("--weights int4 --head-weights int5", "--head-weights int5 is unknown; supported: int8, int4"),
    ("--head-weights int8", "--head-weights int8 goes with --weights: say int8, int4, fp8 or nvfp"),
    ("--dtype float16 --target inductor", "--dtype float16 is unknown; supported: float32, bfl"),
    ("--dtype bfloat16", "--dtype bfloat16 is for target inductor, tensorrt, not onnxruntime"),
    ("--cache-dtype fp8", "--cache-dtype fp8 is unknown; supported: float32, bfloat16, int8"),
    ("--cache-dtype bfloat16", "--cache-dtype bfloat16 is for engines of int8 or int4 weights: "),
    ("--cache-dtype int8", "--cache-dtype int8 is for engines of int8 or int4 weights: "),
    ("--cache-dtype int8 --portable", "--portable engines are fp32, so --cache-dtype int8 needs"),
    ("--weights int8 --portable", "--portable engines are fp32, so --weights int8 needs"),
    ("--exact --portable", "--portable engines compute by onnxruntime's products"),
    ("--exact --target inductor", "--exact: target inductor makes no exact engines"),
    # Machines
    ("--device gpu --target inductor", "--device gpu is unknown; supported: cpu, cuda"),
    ("--device cuda", "--device cuda is for target inductor, not onnxruntime"),
    ("--compute-capability sm120", "--compute-capability sm120 is for target inductor, tensorrt-r"),
    ("--target tensorrt --compute-capability sm120", "--compute-capability sm120 is for target in"),
    (f"{CUDA} --compute-capability sm75", "for one of sm80, sm90, sm100, sm120"),
    (f"{CUDA} --compute-capability sm90,sm100", "compiles for one of sm80, sm90"),
    ("--target inductor --compute-capability sm90", "--compute-capability sm90 is for --device cu"),
    ("--target tensorrt-rtx", "target tensorrt-rtx needs --compute-capability: of sm80, sm86, sm8"),
    (f"{RTX} sm90", "--compute-capability sm90: TensorRT-RTX engines are for RTX GPUs, not for"),
    (f"{RTX} sm120,sm75", "--compute-capability sm75: "),
    (f"{RTX}=", "--compute-capability : TensorRT-RTX engines are"),
    (f"{RTX} sm120 --fast-build", "--fast-build is for target tensorrt, not tensorrt-rtx"),
    (f"{RTX} sm120 --strip-weights", "--strip-weights is for target tensorrt, not tensorrt-rtx"),
    ("--score --target tensorrt", "--score is for target onnxruntime or inductor on a CPU"),
    # Ranks
    ("--tp 2", "--tp and --ep are for target inductor, tensorrt"),
    ("--tp 3 --target inductor", "--tp 3 does not divide num_attention_heads 4;"),
    ("--tp 2 --ep 8 --target inductor", "--ep 8 does not divide both --tp 2 and"),
    ("--attention-dp", "--attention-dp is for several ranks: say --tp, how many they are"),
    ("--rank 0 --target inductor", "--rank 0 needs --tp, the number of ranks"),
    ("--tp 4 --rank 4 --target inductor", "--rank 4 is outside 0..3"),
    ("--tp 4 --rank=-1 --target inductor", "--rank -1 is outside 0..3"),
    ("--draft-vocab 5 --tp 2 --target inductor", "--draft-vocab needs an engine of one rank"),
    *(
        (f"--allreduce-strategy one-shot --target inductor {more}", "--allreduce-strategy one-shot "
         "is for --device cuda and --tp 2 to 16")
        for more in ("--tp 2", "--device cuda", "--device cuda --tp 32")
    ),
    ("--allreduce-strategy ring --target inductor", "--allreduce-strategy ring is unknown; suppor"),
    # Files
    ("--prefix missing.txt", "missing.txt: can't be read"),
    ("--prefix .txt", "prefix .txt: a name has 1 to 64"),
    ("--prefix ../F --prefix ../F", "--prefix: two files have the same name"),
    ("--prefix ../F --target inductor --tp 2", "--prefix is for engines of onnxruntime or induc"),
]  # fmt: skip


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint whose vocabulary two ranks can share."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
    folder = tmp_path_factory.mktemp("refused") / "even"
    (folder.parent / "F").write_text("hello")
    return save_family(folder, "gigachat", make_family("gigachat", **sizes), **sizes)


@pytest.mark.parametrize(("flags", "says"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_refusals(flags: str, says: str, even: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(even)
    before = sorted(even.iterdir())
    nextn = () if "--nextn" in flags else ("--nextn", "1")
    line = refusal("build", "--model", even, "--out", "engine", *nextn, *flags.split())
    assert says in line
    assert sorted(even.iterdir()) == before
