"""Runs `mtpbuild serve` over fake programs: `python -m tests.support.fake_server SECONDS`.

The engine takes that many seconds to load; requests are logged.
"""

import sys
import time
from pathlib import Path

from mtpbuild.runtime import Engine
from mtpbuild.runtime.server.server import Address, serve
from mtpbuild.runtime.server.service import Settings
from tests.support.fakes import FakePrograms, fake_manifest, fake_tokenizer


def load() -> Engine:
    time.sleep(float(sys.argv[1]))
    manifest = fake_manifest()
    return Engine(FakePrograms(manifest), manifest, fake_tokenizer())


if __name__ == "__main__":
    serve(Path("nowhere"), load, Settings(log_requests=True), Address("127.0.0.1", 0, 5.0))
