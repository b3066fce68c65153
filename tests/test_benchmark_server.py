"""The benchmark of servers, against a fake one: what is asked, what is timed, and what is said when it does not answer."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from modeling_domino import cli
from modeling_domino.benchmark.prompts import Prompt
from modeling_domino.benchmark.report import write_report
from modeling_domino.benchmark.server import (
    Arm,
    ServerSettings,
    acceptance,
    ask,
    model_of,
    parse_arms,
    read_levels,
    read_metrics,
    run_servers,
)


TASKS = {"one": [Prompt(f"one/{i}", (f"question {i}", "never asked")) for i in range(4)]}
SETTINGS = ServerSettings(max_new_tokens=6, timeout_seconds=10)
FIRST_TOKEN_SECONDS = 0.01


class FakeServer(ThreadingHTTPServer):
    """Streams `max_tokens` tokens to every question; remembers what it was asked and how many requests overlapped."""

    daemon_threads = True

    def __init__(self, *, metrics: str | None = None, usage: bool = True, status: int = 200):
        self.metrics, self.usage, self.status = metrics, usage, status
        self.bodies: list[dict] = []
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args) -> None:
        """Quiet."""

    def _answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(json.dumps({"data": [{"id": "org/model"}]}))
        elif self.path == "/metrics" and self.server.metrics is not None:
            self._answer(self.server.metrics.replace("COUNT", str(len(self.server.bodies))))
        else:
            self._answer("no", 404)

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        if server.status != 200:
            self._answer('{"error": "max_tokens is too large"}', server.status)
        else:
            self._stream(body)
        with server.lock:
            server.under_way -= 1

    def _stream(self, body: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chunks = [{"choices": [{"delta": {"role": "assistant"}}]}]
        chunks += [{"choices": [{"delta": {"content": "word "}}]}] * body["max_tokens"]
        if self.server.usage:
            chunks.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        for number, chunk in enumerate(chunks):
            if number == 1:
                time.sleep(FIRST_TOKEN_SECONDS)
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def serve():
    servers = []

    def start(**options) -> FakeServer:
        servers.append(FakeServer(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def run(out, *arms: Arm, concurrencies=(1, 4), settings=SETTINGS, tasks=TASKS, **options) -> list[dict]:
    session = {"command": "test"}
    run_servers(arms, tasks, concurrencies, [0.0], settings, out, session=session, **options)
    return read_levels(out)


def test_levels_hold_every_request(serve, tmp_path):
    server = serve()
    levels = run(tmp_path, Arm("plain", server.url))
    assert [(level["arm"], level["model"], level["concurrency"]) for level in levels] == [
        ("plain", "org/model", 1),
        ("plain", "org/model", 4),
    ]
    for level in levels:
        assert [request["id"] for request in level["requests"]] == [f"one/{i}" for i in range(4)]
        assert {request["new_tokens"] for request in level["requests"]} == {6}
        for request in level["requests"]:
            assert FIRST_TOKEN_SECONDS <= request["first_token_seconds"] <= request["seconds"] <= level["seconds"]
        assert level["tau"] is None
    # One warm-up request a place, then the prompts.
    assert len(server.bodies) == (1 + 4) + (4 + 4) and 1 < server.most_under_way <= 4
    body = server.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "question 0"}]
    assert body["max_tokens"] == 6 and body["temperature"] == 0.0
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_acceptance_from_metrics(serve, tmp_path):
    counters = (
        "# HELP vllm:spec_decode_num_drafts_total drafts\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} COUNT\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} COUNT.5\n'
    )
    (level,) = run(tmp_path, Arm("chain", serve(metrics=counters).url), concurrencies=[1])
    assert level["tau"] == 2.0
    means = 'sglang:spec_accept_length{tp_rank="0"} 3.5\nsglang:spec_accept_length{tp_rank="1"} 4.5\n'
    metrics = read_metrics(Arm("chain", serve(metrics=means).url))
    assert acceptance(metrics, metrics) == 4.0
    assert acceptance({}, {}) is None


def test_resuming_and_what_does_not_mix(serve, tmp_path):
    server = serve()
    run(tmp_path, Arm("plain", server.url), concurrencies=[1])
    asked, before = len(server.bodies), (tmp_path / "server.jsonl").read_bytes()
    told = []
    run(tmp_path, Arm("plain", server.url), Arm("chain", server.url), concurrencies=[1], notify=told.append)
    assert len(server.bodies) == asked + 5 and len(told) == 1
    assert (tmp_path / "server.jsonl").read_bytes().startswith(before)
    with pytest.raises(ValueError, match="settings.max_new_tokens = 6, this run has 7"):
        run(tmp_path, Arm("plain", server.url), settings=ServerSettings(max_new_tokens=7))
    with pytest.raises(ValueError, match="were made with requests"):
        run(tmp_path, Arm("plain", server.url), tasks={"one": TASKS["one"][:1]})


def test_servers_that_do_not_answer(serve, tmp_path):
    stopped = serve()
    stopped.shutdown()
    stopped.server_close()
    with pytest.raises(
        ValueError, match=r"chain does not answer at http://127.0.0.1:\d+ \(.*refused.*start the server"
    ):
        run(tmp_path, Arm("plain", serve().url), Arm("chain", stopped.url))
    assert not list(tmp_path.iterdir()), "nothing is measured before every server has answered"
    with pytest.raises(ValueError, match="status 400: .*max_tokens is too large"):
        run(tmp_path, Arm("plain", serve(status=400).url))
    with pytest.raises(ValueError, match="counts no tokens"):
        arm = Arm("plain", serve(usage=False).url)
        ask(arm, "org/model", "one", TASKS["one"][0], 0.0, SETTINGS)
    with pytest.raises(ValueError, match="status 404"):
        model_of(Arm("plain", f"{serve().url}/elsewhere"), SETTINGS)


def test_arms():
    assert parse_arms(["http://a:1/v1/", "eagle-3=https://b"]) == [
        Arm("server", "http://a:1"),
        Arm("eagle-3", "https://b"),
    ]
    with pytest.raises(ValueError, match="takes URL or NAME=URL with http"):
        parse_arms(["localhost:8000"])
    with pytest.raises(ValueError, match="names of their own, got server, server"):
        parse_arms(["http://a", "http://b"])


def test_the_command_compares_arms_and_rebuilds_its_report(serve, tmp_path):
    arms = ["--server", f"chain={serve().url}", "--server", f"plain={serve().url}/v1"]
    (tmp_path / "one.jsonl").write_text("".join(f'{{"id": "one/{i}", "turns": ["q{i}"]}}\n' for i in range(3)))
    out = tmp_path / "out"
    words = ["bench", *arms, "--prompts", str(tmp_path), "--out", str(out), "--max-new-tokens", "5"]
    result = CliRunner().invoke(cli.app, [*words, "--concurrency", "1,2", "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert list(summary["server"]) == ["plain", "chain"]
    levels = summary["server"]["chain"]["levels"]["0"]
    assert set(levels) == {"1", "2"} and levels["2"]["requests"] == 3 and levels["2"]["speedup"] > 0
    assert summary["server"]["plain"]["levels"]["0"]["1"]["speedup"] == 1.0
    assert "127.0.0.1" not in (out / "summary.json").read_text() + (out / "server.jsonl").read_text()
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "| chain | 2 |" in written["report.md"].decode() and "not offered" in written["report.md"].decode()
    write_report(out)
    assert written == {path.name: path.read_bytes() for path in out.iterdir()}
    refused = CliRunner().invoke(cli.app, [*words, "--concurrency", "many"])
    assert refused.exit_code == 2 and "takes numbers separated by commas" in refused.stderr
