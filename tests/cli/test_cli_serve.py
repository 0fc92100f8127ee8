"""`leanbayes serve`: the page in a real browser, and a server that answers nobody but it."""

import io
import json
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_cases import browser as browser
from cli_cases import Cli
from PIL import Image
from serve_cases import ask, dropped, served

from leanbayes.cli.serve import LARGEST
from leanbayes.data import ArrayDataset, load


def png(values: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def digit() -> bytes:
    data = load("digits")
    assert isinstance(data.test, ArrayDataset)
    return png(data.test.x[0, 0].numpy())


@pytest.fixture(scope="module")
def server(digits: Path) -> Iterator[ThreadingHTTPServer]:
    yield from served(digits)


@pytest.fixture(scope="module")
def table_server(toy: Path) -> Iterator[ThreadingHTTPServer]:
    yield from served(toy)


def test_it_listens_on_this_machine_only(server: ThreadingHTTPServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_predictions_are_those_of_the_command(
    server: ThreadingHTTPServer, digits: Path, digit: bytes, cli: Cli
) -> None:
    Path("a.png").write_bytes(digit)
    (expected,) = json.loads(cli("predict", digits, "a.png", "--json").out)
    status, (row,), _ = ask(server, body=digit)
    assert status == 200
    assert row == expected | {"image": "the upload"}


def test_rows_of_a_table_are_predicted(table_server: ThreadingHTTPServer) -> None:
    status, rows, _ = ask(table_server, body=b"0.5\n3.0\n")
    assert status == 200
    assert [row["row"] for row in rows] == [1, 2]
    assert all(row["std"] > 0 for row in rows)


def test_what_is_wrong_is_refused_with_a_sentence(
    server: ThreadingHTTPServer, table_server: ThreadingHTTPServer
) -> None:
    local = f"127.0.0.1:{server.server_port}"
    for code, reply in (
        (400, ask(server, body=b"no image")),
        (400, ask(table_server, body=b"1,2,3\n")),
        (400, ask(table_server, body=b"")),
        (404, ask(server, "GET", "/../run.json")),
        (404, ask(server, path="/")),
        (403, ask(server, "GET", "/", Host="evil.example")),
        (403, ask(server, body=b"x", Host=local, Origin="http://evil.example")),
        (413, ask(server, Content_Length=str(LARGEST + 1))),
        (411, ask(server, Content_Length="-1")),
    ):
        status, found, headers = reply
        assert status == code
        assert found["error"].endswith((".", "/"))
        assert "/tmp" not in found["error"]
        assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_the_page_in_a_browser(browser: Any, server: ThreadingHTTPServer, digit: bytes) -> None:
    page = browser.new_context().new_page()
    page.set_default_timeout(30_000)
    heard: list[str] = []
    requested: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    address = f"http://127.0.0.1:{server.server_port}/"
    page.goto(address)
    upload = {"name": "<b>.png", "mimeType": "image/png", "buffer": digit}
    page.set_input_files("#file", [upload])
    page.wait_for_selector("article")
    (row,) = ask(server, body=digit)[1]
    assert page.text_content("[data-name=label]") == str(row["label"])
    assert float(page.text_content("[data-name=probability]")) == pytest.approx(row["probability"], rel=1e-3)
    assert {"total_uncertainty", "epistemic_uncertainty", "verdict"} <= row.keys()
    assert page.text_content("[data-name=verdict]") == row["verdict"]
    assert page.evaluate("document.querySelector('article img').naturalWidth") == 8
    assert page.text_content("#error") == ""
    assert not heard
    dropped(page, "a.png", "nothing")
    page.wait_for_selector("#error:not(:empty)")
    assert "the upload" in page.text_content("#error")
    assert page.locator("article").count() == 1
    assert all(url.startswith((address, "blob:", "data:")) for url in requested)
    page.context.close()


def test_the_page_of_a_table_in_a_browser(browser: Any, table_server: ThreadingHTTPServer) -> None:
    page = browser.new_context().new_page()
    page.set_default_timeout(30_000)
    page.goto(f"http://localhost:{table_server.server_port}/")
    page.fill("#rows", "0.5\n3.0")
    page.click("button")
    page.wait_for_selector("article")
    assert page.locator("article").count() == 2
    assert page.locator("[data-name=row]").all_text_contents() == ["1", "2"]
    dropped(page, "rows.csv", "0.25\n")
    page.wait_for_selector("article:nth-child(3)")
    assert page.input_value("#rows") == "0.25\n"
    page.context.close()


def test_a_port_in_use_and_a_wrong_one_are_refused(
    server: ThreadingHTTPServer, digits: Path, capsys: pytest.CaptureFixture[str], cli: Cli
) -> None:
    assert "--port" in cli("serve", digits, "--port", server.server_port, code=1).err
    assert "65535" in cli("serve", digits, "--port", 70000, code=2).err


def test_the_command_prints_the_address_and_stops_with_control_c(
    digits: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(server: ThreadingHTTPServer) -> None:
        assert server.server_port > 0
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", interrupted)
    assert "open http://127.0.0.1:" in cli("serve", digits, "--port", 0, code=130).out
    found = json.loads(cli("serve", digits, "--port", 0, "--json", code=130).out)
    assert found["address"].startswith("http://127.0.0.1:")
