"""POST /tokenize and /detokenize: texts and conversations to token ids, and token ids to text."""

from typing import Any

from mtpbuild.runtime.errors import MtpbuildError
from mtpbuild.runtime.server.chat import encode_prompt
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.protocol import ChatTokensBody, TextTokensBody, TokensBody
from mtpbuild.runtime.server.service import Service
from mtpbuild.runtime.text.tokenizer import Tokenizer

MAX_CONTEXTS = 4  # context lengths that a text to tokenise may have


def tokenize_body(service: Service, body: TextTokensBody | ChatTokensBody) -> dict[str, Any]:
    """Return the ids and their number, as vLLM does; raises ApiError."""
    tokenizer, engine = _find_tokenizer(service), service.engine
    if isinstance(body, ChatTokensBody):
        ids = encode_prompt(engine, body)
    else:
        special = body.add_special_tokens is not False
        most = MAX_CONTEXTS * engine.manifest.build.max_seq_len
        if tokenizer.exceeds(body.prompt, most):
            raise ApiError(400, f"the text has more than {most} tokens", "prompt")
        try:
            ids = tokenizer.encode(body.prompt, add_special_tokens=special)
        except MtpbuildError as error:
            raise ApiError(400, str(error), "prompt") from None
    names = [tokenizer.text([id], [id]) for id in ids] if body.return_token_strs else None
    capacity = engine.manifest.build.max_seq_len
    return {"count": len(ids), "max_model_len": capacity, "tokens": ids, "token_strs": names}


def detokenize_body(service: Service, body: TokensBody) -> dict[str, Any]:
    """Return the text of token ids, including special tokens; raises ApiError."""
    tokenizer = _find_tokenizer(service)
    last = service.manifest.model.vocab_size - 1
    if max(body.tokens, default=0) > last:
        raise ApiError(400, f"a token id is outside the vocabulary 0..{last}", "tokens")
    return {"prompt": tokenizer.text(body.tokens, body.tokens)}


def _find_tokenizer(service: Service) -> Tokenizer:
    if (tokenizer := service.engine.tokenizer) is None:
        raise ApiError(400, "this engine was built without a tokenizer")
    return tokenizer
