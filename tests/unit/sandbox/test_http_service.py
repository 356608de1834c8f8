"""A SandboxFusion-compatible service, here a small server that runs programs as this user."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.errors import ConfigError, SandboxError
from gtpo_megatron.sandbox import http_service
from gtpo_megatron.sandbox.choose import open_sandbox
from gtpo_megatron.sandbox.protocol import Case, Job, Limits


class Service(BaseHTTPRequestHandler):
    """Answers as SandboxFusion does; ``mood`` makes it misbehave so many times."""

    mood: ClassVar[list] = []
    asked: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Service.asked.append((self.path, body))
        if Service.mood:
            status, text = Service.mood.pop(0)
            return self._say(status, text)
        try:
            ran = subprocess.run(
                [sys.executable, "-c", body["code"]],
                input=body["stdin"],
                timeout=body["run_timeout"],
                capture_output=True,
                text=True,
                check=False,
            )
            result = {"status": "Finished", "return_code": ran.returncode, "stdout": ran.stdout, "stderr": ran.stderr}
        except subprocess.TimeoutExpired:
            result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
        good = result.get("return_code") == 0
        answer = {
            "status": "Success" if good else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": result,
        }
        return self._say(200, json.dumps(answer))

    def _say(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(http_service, "FIRST_WAIT_S", 0.01)
    Service.mood, Service.asked = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield open_sandbox(f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
        thread.join()


def run(service, source, *cases, **limits):
    return service.run(Job(source=source, language="python", cases=cases, limits=Limits(**limits)))


@pytest.mark.slow
def test_standard_input_calls_and_assertions(service):
    source = (
        "def f(x):\n    return (x, {2, 1})\n"
        "if __name__ == '__main__':\n    import sys\n    print('hi', sys.stdin.read())"
    )
    found = run(
        service,
        source,
        Case(stdin="4"),
        Case(function="f", arguments="[3]"),
        Case(code="assert f(1)"),
        Case(code="f()"),
        case_s=25.0,  # a Python that starts on a busy machine
    ).results
    assert [one.status for one in found] == ["ok", "ok", "ok", "error"]
    assert found[0].output == "hi 4\n"
    assert json.loads(found[1].output) == [3, [1, 2]]
    assert "TypeError" in found[3].detail
    assert Service.asked[0][0] == "/run_code"


def test_a_program_that_leaves_early_has_not_passed(service):
    [found] = run(service, "raise SystemExit(0)", Case(code="assert False")).results
    assert (found.status, found.detail) == ("error", "SystemExit: 0 (line 1)")
    [found] = run(service, "import os; os._exit(0)", Case(function="f")).results
    assert (found.status, found.detail) == ("error", "the program ended before its tests")


def test_a_program_that_hangs_ends_the_job(service):
    found = run(service, "while True: pass", Case(stdin=""), Case(stdin=""), case_s=1.0).results
    assert [one.status for one in found] == ["timeout", "not run"]


def test_an_overloaded_service_is_asked_again(service):
    Service.mood = [(503, "busy"), (429, "")]
    assert run(service, "print(1)", Case(stdin="")).results[0].output == "1\n"
    assert len(Service.asked) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mood", "said"),
    [
        ([(200, "<html>hello</html>")], "not valid JSON"),
        ([(200, "[]")], r"it answered \[\]"),
        ([(404, "")], "HTTP status 404"),
        ([(500, "")] * 3, "HTTP status 500"),
        ([(200, '{"status": "SandboxError", "message": "no space"}')] * 3, "no space"),
        ([(200, '{"status": "Failed"}')], "answered"),
    ],
)
def test_a_service_that_fails_is_an_error_and_no_verdict(service, mood, said):
    Service.mood = list(mood)
    with pytest.raises(SandboxError, match=said):
        run(service, "print(1)", Case(stdin=""))


def test_a_program_that_does_not_compile(service):
    Service.mood = [(200, json.dumps({"status": "Failed", "compile_result": {"status": "Error", "stderr": "line 1"}}))]
    assert run(service, "x", Case(stdin="")).compile_error == "line 1"


def test_a_service_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(http_service, "FIRST_WAIT_S", 0.01)
    with pytest.raises(SandboxError, match="gave no result"):
        run(open_sandbox("http://127.0.0.1:9"), "", Case(stdin=""))


def test_other_names_are_refused():
    with pytest.raises(ConfigError, match="must be bubblewrap, http"):
        RewardConfig(sandbox="docker")


def test_a_program_that_reaches_for_more_while_it_runs_gets_a_process_of_its_own(service):
    source = "import random\ndef f(x):\n    g = random.Random\n    g.x = 1\n    return x"
    [found] = run(service, source, Case(code="assert f(1) == 1"), case_s=25.0).results
    assert found.status == "ok", found
    [found] = run(service, source, Case(code="assert f(1) == 2"), case_s=25.0).results
    assert found.status == "error"
