"""Serve the studio: on this machine only unless told otherwise, without network, and without leftovers."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from visualtokens.errors import UserError

USER = "studio"  # who signs in with the password
MAX_UPLOAD = 32 * 2**20  # bytes of a file
CLEAN_EVERY, KEEP_FILES = 300, 3600  # seconds: how often uploads are looked through, and how long they stay
# Nothing is loaded from anywhere else. Gradio's page needs inline scripts and styles.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' blob:; font-src 'self' data:; connect-src 'self'; "
    "worker-src 'self' blob:; frame-src 'self'; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'self'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def is_local(host: str) -> bool:
    """Return whether only this machine reaches a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    models: Mapping[str, Any],
    sources: Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    password: str | None = None,
    started: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the studio until the process is interrupted; ``started`` is called with its address.

    ``models`` are checkpoints by name, ``sources`` their :class:`~visualtokens.studio.workbench.Source`. A
    host that others can reach needs a ``password``. Uploads are deleted at the end.
    """
    if not is_local(host) and not password:
        raise UserError(
            f"host={host!r} lets others in; set a password (VTOK_STUDIO_PASSWORD), or use 127.0.0.1"
        )
    listener = _listen(host, port)
    with listener, tempfile.TemporaryDirectory(prefix="vtok-studio-") as folder:
        app = create(models, sources, folder=Path(folder), host=host, password=password)
        number = listener.getsockname()[1]
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, access_log=False)
        started(f"http://{f'[{host}]' if ':' in host else host}:{number}")
        _Server(config).run(sockets=[listener])


def create(
    models: Mapping[str, Any],
    sources: Mapping[str, Any],
    *,
    folder: Path,
    host: str = "127.0.0.1",
    password: str | None = None,
) -> FastAPI:
    """Return the app, whose uploads and downloads are in ``folder``."""
    # Gradio reads these when it is imported or when components are made.
    os.environ |= {"GRADIO_TEMP_DIR": str(folder), "GRADIO_ANALYTICS_ENABLED": "False"}
    import gradio as gr

    from visualtokens.studio.actions import Actions
    from visualtokens.studio.examples import write_examples
    from visualtokens.studio.layout import THEME, build
    from visualtokens.studio.parts import CSS
    from visualtokens.studio.workbench import Workbench

    logging.getLogger("httpx").setLevel(logging.WARNING)
    workbench = Workbench(models)
    examples = write_examples(folder / "examples", next(iter(models.values())))
    page = build(Actions(workbench, sources, folder=folder), examples=examples)
    page.delete_cache = (CLEAN_EVERY, KEEP_FILES)
    app, began = FastAPI(docs_url=None, redoc_url=None, openapi_url=None), time.monotonic()

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "models": list(models), "seconds": round(time.monotonic() - began)}

    @app.middleware("http")
    async def headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        for name, value in HEADERS.items():
            response.headers[name] = value
        return response

    # A page of another site that resolves to this address is not answered.
    allowed = ["127.0.0.1", "localhost", "[::1]"] if is_local(host) else ["*"]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed)
    return gr.mount_gradio_app(
        app,
        page,
        path="/",
        auth=None if not password else (USER, password),
        max_file_size=MAX_UPLOAD,
        show_error=False,
        ssr_mode=False,
        footer_links=["api"],
        theme=THEME,
        css=CSS,
    )


class _Server(uvicorn.Server):
    """Uvicorn's server, which returns after SIGINT and SIGTERM instead of raising them again.

    The process is then alive to delete its files.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(f"port={port} on {host} is not available ({error}); give another --port") from error
    return listener
