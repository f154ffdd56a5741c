"""The services of a server: one for each engine, chosen by a request's field `model`."""

import asyncio
from typing import Any

from mtpbuild.runtime.engine.metrics import write_metrics
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.service import Service


class Services:
    """The services of a server, which share all settings but their models' own."""

    def __init__(self, *each: Service) -> None:
        self.each = each
        self.settings = each[0].settings
        self.reading = each[0].reading  # reads bodies before their model is known

    def find(self, model: str | None) -> Service:
        """Return the service of a model, by default the first; raises ApiError."""
        found = (service for service in self.each if model in (None, service.model))
        if (service := next(found, None)) is None:
            raise ApiError(404, f"The model `{model}` does not exist.", "model")
        return service

    def cards(self) -> list[dict[str, Any]]:
        """Describe the models, as vLLM does, with llama.cpp's status; raises ApiError."""
        return [
            {
                "id": service.model,
                "object": "model",
                "created": 0,
                "owned_by": "mtpbuild",
                "root": service.manifest.model.name,
                "parent": None,
                "max_model_len": service.manifest.build.max_seq_len,
                "status": {"value": "loaded" if service.is_loaded else "unloaded"},
            }
            for service in self.each
        ]

    def write_metrics(self) -> str:
        """Return the metrics of the models that were loaded, as Prometheus's text."""
        return write_metrics([each for s in self.each if (each := s.metered) is not None])

    @property
    def open(self) -> int:
        """The number of choices that are under way or wait."""
        return sum(service.open for service in self.each)

    @property
    def ready(self) -> bool:
        return all(service.ready for service in self.each)

    @property
    def failed(self) -> EngineError | None:
        return next((s.failed for s in self.each if s.failed is not None), None)

    async def load(self) -> None:
        """Load the engines that are not loaded on demand."""
        await asyncio.gather(*(service.load() for service in self.each))

    async def watch(self) -> None:
        """Look after all engines."""
        await asyncio.gather(*(service.watch() for service in self.each))

    async def drain(self, timeout: float) -> bool:
        """Drain all services; return whether all requests were answered."""
        return all(await asyncio.gather(*(service.drain(timeout) for service in self.each)))

    def close(self) -> None:
        """Close all engines."""
        for service in self.each:
            service.close()
