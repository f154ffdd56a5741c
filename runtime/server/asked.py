"""Conversion of a request's body into engine requests, off the event loop if it takes long."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.errors import MissingDependencyError, RequestError
from mtpbuild.runtime.server.answers import Answer
from mtpbuild.runtime.server.protocol import StreamedBody
from mtpbuild.runtime.server.sampled import field_error
from mtpbuild.runtime.server.service import Service

log = logging.getLogger("mtpbuild")
FEW = 4  # choices up to which the body is converted on the event loop
Read = Callable[[Service, Engine, Any], Answer]


@dataclass(frozen=True)
class Asked:
    """A body, and the function that reads its prompts and settings."""

    read: Read
    body: StreamedBody
    long: bool  # the body is long, so tokenising takes time

    async def answer(self, service: Service, engine: Engine) -> Answer:
        """Create the answer and its engine requests; raises ApiError.

        Prompts are read in one pool and grammars compiled in another, so that no prompt waits for
        the grammar of another request.
        """
        if self.long or self.body.count > FEW:
            answer = await service.reading.run(object(), self._begin, service, engine)
        else:
            answer = self._begin(service, engine)
        if form := answer.choices[0].params.structured_outputs:
            await service.compiling.run(form, _prepare, engine, answer)
        for choice in answer.choices:
            service.metrics.asked_tokens.observe(choice.params.max_tokens)
        service.metrics.asked_choices.observe(answer.n)
        return answer

    def _begin(self, service: Service, engine: Engine) -> Answer:
        answer = self.read(service, engine, self.body)
        if service.settings.log_requests:
            given = self.body.model_dump(exclude_none=True)
            log.info("%s", json.dumps({"id": answer.id} | given))
        if answer.choices[0].params.structured_outputs is None:
            _prepare(engine, answer)
        return answer


def _prepare(engine: Engine, answer: Answer) -> None:
    """Create the engine requests of an answer."""
    try:
        answer.requests = [engine.prepare(each.ids, each.params) for each in answer.choices]
    except (RequestError, MissingDependencyError) as error:
        raise field_error(error, {"structured_outputs": answer.form_field}) from None
