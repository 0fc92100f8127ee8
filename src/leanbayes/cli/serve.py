"""`leanbayes serve RUN`: try a model in the browser, on a page of this machine that needs nothing from elsewhere."""

import html
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from leanbayes.cli.console import line
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.predict import PredictOptions, predict_image, predict_table
from leanbayes.cli.runs import TrainedRun, open_run
from leanbayes.cli.text_models import is_text_model, open_text_model
from leanbayes.core.json_values import json_text
from leanbayes.errors import LeanBayesError

HOST = "127.0.0.1"
LARGEST = 16 << 20  # bytes of an upload
_SECONDS = 30  # that a connection may be silent
_PAGE = Path(__file__).parent / "serve.html"
# The page runs its own script and style, shows images that it holds, and asks this server. Nothing else is allowed.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


_ASKS = {  # what the page asks for
    "image": "",
    "table": "Rows of inputs, separated by commas, one row per line",
    "text": "A text",
}


@dataclass(frozen=True)
class ServeOptions:
    """Try a model in the browser: drop an image, a row or a text, and see what it predicts and whether it would answer.

    The page is for this machine only: the server listens on 127.0.0.1, takes uploads of at most 16 MiB, and stores
    none of them. Ctrl-C stops it. For a service use export, which writes a file for onnxruntime.

    A text classifier of transformers is a folder with model.safetensors, which lb.save wrote, and what save_pretrained
    of its config and of its tokenizer wrote.

    Attributes:
        run: folder of the run, or of a text classifier.
        network: function that builds the network of a text classifier, as MODULE:FUNCTION, such as one with adapters.
            None means the network that its config describes.
        port: port of the page. 0 means a free one.
        samples: Monte Carlo samples per prediction. None means those of the policy, or the default of the method.
        rule: how random weights are combined with activations: sample, moments, mean or another rule, also with
            settings, such as adjoint:mean=moments,margins=3. moments needs one pass and no samples. None means the rule
            of the policy, or the one used in training.
        device: where to predict. None means the GPU, if there is one.
        seed: seed of the samples.
        json: print the address of the page as JSON.
    """

    run: RunFolder
    network: str | None = None
    port: int = 8000
    samples: int | None = None
    rule: str | None = None
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


@dataclass(frozen=True)
class Served:
    """What a page is about, and the function that predicts an upload."""

    title: str
    kind: Literal["image", "table", "text"]
    predict: Callable[[bytes], list[dict[str, Any]]]


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(ServeOptions, words, "serve")
    if not 0 <= options.port <= 65535:
        raise LeanBayesError(f"--port {options.port} must be from 0 to 65535.")
    return lambda: _serve(options)


def _serve(options: ServeOptions) -> None:
    with server_of(options) as server:
        address = f"http://{HOST}:{server.server_port}"
        if options.json:
            print(json_text({"run": str(options.run), "address": address}), flush=True)
        else:
            line(f"{options.run}: open {address} in a browser (Ctrl-C stops)")
        server.serve_forever()


def server_of(options: ServeOptions) -> ThreadingHTTPServer:
    """Return a server for a model, which listens but does not answer yet."""
    settings = PredictOptions(options.run, (), options.samples, options.rule, options.device, options.seed)
    if is_text_model(options.run):
        served = _served_text(options, settings)
    elif options.network is not None:
        raise LeanBayesError(f"--network is for text classifiers, and {options.run} has no tokenizer: leave it out.")
    else:
        served = _served_run(open_run(options.run, options.device), settings)

    class Bound(_Handler):
        predict = staticmethod(served.predict)
        page = page_of(served)

    try:
        return ThreadingHTTPServer((HOST, options.port), Bound)
    except OSError as error:
        raise LeanBayesError(f"Port {options.port} cannot be used ({error.strerror}): give another --port.") from None


def _served_text(options: ServeOptions, settings: PredictOptions) -> Served:
    text_model = open_text_model(options.run, options.network, options.device)

    def predict(body: bytes) -> list[dict[str, Any]]:
        try:
            return [text_model.predict(body.decode("utf-8"), settings)]
        except UnicodeDecodeError:
            raise LeanBayesError("The upload is not a text: write one.") from None

    return Served(text_model.title, "text", predict)


def _served_run(run: TrainedRun, settings: PredictOptions) -> Served:
    config = run.record["config"]
    table = len(config["model"]["input_shape"]) != 3

    def predict(body: bytes) -> list[dict[str, Any]]:
        """Predict an upload, which is a file for the time of the prediction only."""
        name = "the upload"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "upload.csv" if table else "upload")
            path.write_bytes(body)
            try:
                rows = predict_table(run, path, settings) if table else [predict_image(run, path, settings)]
            except LeanBayesError as error:
                raise LeanBayesError(str(error).replace(str(path), name)) from None
        return [{key: name if key in ("image", "table") else value for key, value in row.items()} for row in rows]

    return Served(f"{config['source']['name']}, {config['model']['name']}", "table" if table else "image", predict)


def page_of(served: Served) -> bytes:
    """Return the page of a model."""
    values = {"title": served.title, "kind": served.kind, "asks": _ASKS[served.kind]}
    text = _PAGE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", html.escape(value))
    return text.encode()


class _Handler(BaseHTTPRequestHandler):
    predict: Callable[[bytes], list[dict[str, Any]]]
    page: bytes
    timeout = _SECONDS

    def do_GET(self) -> None:
        if not self._is_local():
            self._refuse(403, "Open the page by its address on this machine.")
        elif self.path == "/":
            self._reply(200, self.page, "text/html; charset=utf-8")
        else:
            self._refuse(404, "There is only one page: /")

    def do_POST(self) -> None:
        if not self._is_local():
            return self._refuse(403, "Only the page of this server may ask it.")
        if self.path != "/predict":
            return self._refuse(404, "Post to /predict.")
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            return self._refuse(411, "The request has no length.")
        if int(length) > LARGEST:
            return self._refuse(413, f"The upload is larger than {LARGEST >> 20} MiB.")
        body = self.rfile.read(int(length))
        try:
            rows = self.predict(body)
        except LeanBayesError as error:
            return self._refuse(400, str(error))
        return self._reply(200, json_text(rows).encode(), "application/json")

    def _is_local(self) -> bool:
        """Whether the browser was told to ask this server by this machine, not by a page or name of another one."""
        hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}  # type: ignore[attr-defined]
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in hosts and (origin is None or origin.removeprefix("http://") in hosts)

    def _refuse(self, code: int, sentence: str) -> None:
        self.close_connection = True  # the body may not have been read
        self._reply(code, json.dumps({"error": sentence}).encode(), "application/json")

    def _reply(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing for each request."""
