"""The web page at / and the API's at /docs, with their files; nothing comes from elsewhere.

The files tell nothing of this server, so they need no key; what they fetch does.
"""

from importlib.resources import files

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

PAGES = {"/": "index.html", "/docs": "docs.html"}
FILES = ("icon.svg", "style.css", "session.js", "page.js", "docs.js")
PUBLIC_PATHS = frozenset({*PAGES, *(f"/static/{name}" for name in FILES)})
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """Each file is read once, here."""
    paths = PAGES | {f"/static/{name}": name for name in FILES}
    return [_route(path, name) for path, name in paths.items()]


def _route(path: str, name: str) -> Route:
    content = files("jaxprefill.server").joinpath("static", name).read_bytes()
    kind = _KINDS[name.rpartition(".")[2]]

    async def show(_: HttpRequest) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return Route(path, show)
