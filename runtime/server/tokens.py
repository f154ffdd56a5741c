"""POST /tokenize and /detokenize: texts and conversations to token ids, and token ids to text."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.server.answering import convert
from mtpbuild.runtime.server.bodies import BodyRoute
from mtpbuild.runtime.server.chat import encode_prompt
from mtpbuild.runtime.server.errors import ERRORS, ApiError
from mtpbuild.runtime.server.params import translate_errors
from mtpbuild.runtime.server.protocol import Body, ChatBody, Id, Many
from mtpbuild.runtime.text.tokenizer import Tokenizer

router = APIRouter(route_class=BodyRoute)
MAX_CONTEXTS = 4  # context lengths that a text to tokenise may have


class ChatTokensBody(ChatBody):
    """The body of POST /tokenize for a conversation."""

    return_token_strs: bool | None = None


class TextTokensBody(Body):
    """The body of POST /tokenize for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokensBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Many[Id]


@router.post("/tokenize", responses=ERRORS)
async def tokenize(body: TextTokensBody | ChatTokensBody, request: Request) -> Response:
    """Turn a text, or a chat's prompt, into token ids."""
    return await convert(request, body, _tokenize)


@router.post("/detokenize", responses=ERRORS)
async def detokenize(body: TokensBody, request: Request) -> Response:
    """Turn token ids into text, with the names of special tokens."""
    return await convert(request, body, _detokenize)


def _tokenize(engine: Engine, body: TextTokensBody | ChatTokensBody) -> dict[str, Any]:
    """Return the ids and their number, as vLLM does; raises ApiError."""
    tokenizer = _require_tokenizer(engine)
    capacity = engine.manifest.build.max_seq_len
    if isinstance(body, ChatTokensBody):
        ids = encode_prompt(engine, body)
    elif tokenizer.exceeds(body.prompt, limit := MAX_CONTEXTS * capacity):
        raise ApiError(400, f"the text has more than {limit} tokens", "prompt")
    else:
        special = body.add_special_tokens is not False
        with translate_errors("prompt"):
            ids = tokenizer.encode(body.prompt, add_special_tokens=special)
    names = [tokenizer.text([id], [id]) for id in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": capacity, "tokens": ids, "token_strs": names}


def _detokenize(engine: Engine, body: TokensBody) -> dict[str, Any]:
    """Return the text of token ids; raises ApiError."""
    tokenizer = _require_tokenizer(engine)
    last = engine.manifest.model.vocab_size - 1
    if max(body.tokens, default=0) > last:
        raise ApiError(400, f"a token id is outside the vocabulary 0..{last}", "tokens")
    return {"prompt": tokenizer.text(body.tokens, body.tokens)}


def _require_tokenizer(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise ApiError(400, "this engine was built without a tokenizer")
    return engine.tokenizer
