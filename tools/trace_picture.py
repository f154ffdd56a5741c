"""Takes a picture of the page of a real `mtpbuild run --trace out.html`: docs/trace.png.

python tools/trace_picture.py engines/tiny_n3 --out docs/trace.png

It needs Chromium; --browser names its executable.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

from mtpbuild.runtime import Engine, SamplingParams, Trace

PROMPT = 'def is_prime(n):\n    """'
PARAMS = SamplingParams(max_tokens=110, temperature=0.7, seed=2)
POINTED_AT = 69  # position of the token whose card is shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--out", type=Path, default=Path("docs/trace.png"))
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--size", default="1100,960")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "trace.html"
        with (
            Engine.load(arguments.engine, prefix_cache=False) as engine,
            Trace(engine, page) as trace,
        ):
            engine.stream(PROMPT, PARAMS, observer=trace.request()).result()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        shot = [f"--window-size={arguments.size}", f"--screenshot={arguments.out.resolve()}"]
        address = f"{page.as_uri()}#position={POINTED_AT}"
        subprocess.run([arguments.browser, *flags, *shot, address], check=True)


if __name__ == "__main__":
    main()
