"""Runs a server over fake programs: `python -m tests.support.fake_server LOADING STEP DRAIN`.

These are the seconds that loading, a step and `--drain-timeout` take; requests are logged, unless
`quiet` follows.
"""

import sys
import time

from mtpbuild.runtime import Engine
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.server import Address, serve
from mtpbuild.runtime.server.service import Service, Services
from tests.support.fakes import fake_engine

LOADING, STEP, DRAIN = map(float, sys.argv[1:4])
QUIET = sys.argv[4:] == ["quiet"]


def load() -> Engine:
    if LOADING:
        print("loading", file=sys.stderr, flush=True)
    time.sleep(LOADING)
    return fake_engine(max_seq_len=5000, step_s=STEP)[0]


if __name__ == "__main__":
    service = Service(ServerOptions(log_requests=not QUIET), load)
    serve(Services(service), Address("127.0.0.1", 0, DRAIN))
