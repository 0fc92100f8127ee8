"""Shared by the tests of `leanbayes serve`."""

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from leanbayes.cli.serve import ServeOptions, server_of


def served(folder: Path, **settings: Any) -> Iterator[ThreadingHTTPServer]:
    with server_of(ServeOptions(folder, port=0, **settings)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: ThreadingHTTPServer, method: str = "POST", path: str = "/predict", body: bytes = b"", **headers: str
) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    content, found = reply.read(), dict(reply.headers)
    connection.close()
    return reply.status, json.loads(content) if found["Content-Type"] == "application/json" else content, found


def dropped(page: Any, name: str, content: str) -> None:
    """Drop a file on a page."""
    page.evaluate(
        """([name, content]) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([content], name));
          document.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
        }""",
        [name, content],
    )
