"""The page to chat on: its files, and the markdown of its answers as HTML."""

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from markdown_it import MarkdownIt
from starlette.responses import FileResponse, Response

from mtpbuild.runtime.server.bodies import BodyRoute
from mtpbuild.runtime.server.errors import ERRORS, ApiError, JsonResponse, find_route_path
from mtpbuild.runtime.server.protocol import Body

router = APIRouter(route_class=BodyRoute)
# Path -> file beside this one.
FILES = {"/": "page.html"} | {f"/{name}": name for name in ("page.css", "page.js", "chat.js")}
MAX_CHARS = 1 << 18  # of a text that is rendered
MANY_BRACKETS = 1000  # from here on links are not looked for: that takes time squared
HEADERS = {
    # No script but the page's own, and nothing from elsewhere, even if HTML got into an answer.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class MarkdownBody(Body):
    """The body of POST /markdown."""

    text: str


@router.post("/markdown", responses=ERRORS)
async def render(body: MarkdownBody, request: Request) -> Response:
    """Render markdown, for the page."""
    if len(body.text) > MAX_CHARS:
        raise ApiError(400, f"the text has more than {MAX_CHARS} characters", "text")
    reading = request.app.state.services.reading
    return JsonResponse({"html": await reading.run(object(), render_markdown, body.text)})


def render_markdown(text: str) -> str:
    """Render markdown as HTML that is safe to show; links open elsewhere."""
    markdown = _make_markdown(text.count("[") < MANY_BRACKETS)
    tokens = markdown.parse(text)
    for token in tokens:
        for inner in token.children or ():
            if inner.type == "link_open":
                inner.attrs |= {"target": "_blank", "rel": "noopener noreferrer"}
        if style := token.attrs.pop("style", None):  # of a table's column; the policy forbids it
            token.attrs["align"] = str(style).removeprefix("text-align:")
    return markdown.renderer.render(tokens, markdown.options, {})


@cache
def _make_markdown(links: bool) -> MarkdownIt:
    """Return a renderer of markdown that escapes HTML, and links images instead of loading them."""
    without = ["image"] if links else ["image", "link"]
    return MarkdownIt("js-default", {"breaks": True}).disable(without)


async def read_page(request: Request) -> Response:
    """Return the page's file at the request's path."""
    name = FILES[find_route_path(request.scope)]
    return FileResponse(Path(__file__).with_name(name), headers=HEADERS)


for path in FILES:
    router.add_route(path, read_page, include_in_schema=False)
