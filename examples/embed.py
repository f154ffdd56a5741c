"""Serves text from an engine to any number of clients, with nothing but the standard library.

    python examples/embed.py engines/tiny_n3 --port 8000
    curl -N localhost:8000 -d '{"prompt": "def fibonacci(n):", "max_tokens": 64}'

The answer streams as it is generated. A client that goes away ends its request.
"""

import argparse
import json
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mtpbuild.runtime import Engine, EngineError, RequestError, SamplingParams, Stream


class Handler(BaseHTTPRequestHandler):
    """A handler that answers one client in its own thread; the engine queues the requests."""

    def __init__(self, engine: Engine, *args: Any) -> None:
        self.engine = engine
        super().__init__(*args)

    def do_POST(self) -> None:
        try:
            stream = self.start(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        except (RequestError, ValueError, TypeError) as error:
            return self.send_error(400, "bad request", str(error))
        except EngineError as error:
            return self.send_error(503, "engine unavailable", str(error))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.end_headers()
        with stream:  # leaving the block ends the request, even if writing failed
            for chunk in stream:
                self.wfile.write(chunk.text.encode())
        return None

    def start(self, body: bytes) -> Stream:
        """Start a request from JSON: {"prompt": ..., and any field of SamplingParams}."""
        settings = dict(json.loads(body))
        return self.engine.stream(settings.pop("prompt", ""), SamplingParams(**settings))


def serve(engine: Engine, port: int = 0) -> ThreadingHTTPServer:
    """Return a server on the loopback interface; call its `serve_forever`."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, engine))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    with Engine.load(arguments.engine) as loaded, serve(loaded, arguments.port) as server:
        server.serve_forever()
