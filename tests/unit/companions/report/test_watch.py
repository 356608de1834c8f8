import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from dataclasses import replace

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.watch import status_line
from gtpo_megatron.companions.report import page as report
from gtpo_megatron.companions.report import watch
from gtpo_megatron.companions.report.watch import LiveReport, ReportServer
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.run_folder import held_locks
from gtpo_megatron.run_folder import state as run_state
from gtpo_megatron.run_folder.metrics_file import JsonlSink
from gtpo_megatron.run_folder.rollout_log import RolloutLog
from recipes.tiny_cpu import gtpo
from tests.unit.companions.report.run_folders import make_run, response
from tests.unit.companions.report.test_in_browser import BROWSER

PAUSE = watch.PAUSE_PER_LOOK


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(watch, "PAUSE_PER_LOOK", 0.0)


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "run", num_steps=4)


@pytest.fixture
def server(folder):
    server = ReportServer(LiveReport([folder], status=lambda: "running, step 4"), port=0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.close()
    thread.join()


def get(server, path, host=None, shown=""):
    address = server.url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", path, headers={"Host": host or address, "If-None-Match": shown})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, answer.headers["ETag"]


def add_step(folder, step):
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "rollout/reward_mean": 0.9}) + "\n")


def test_the_page_is_the_report_with_a_script_that_follows(server):
    status, page, version = get(server, "/")
    assert status == 200
    assert "4 of 40 steps" in page
    assert f"data-version={version}>running, step 4</p>" in page
    assert "If-None-Match" in page
    assert "plotly.js v" not in page  # which would travel with every step
    assert "plotly.js v" in get(server, "/plotly.js")[1]


def test_a_page_is_sent_once_and_again_when_the_run_goes_on(server, folder):
    _, _, first = get(server, "/")
    get_again = get(server, "/", shown=first)
    assert get_again == (304, "", first)
    add_step(folder, 5)
    status, page, second = get(server, "/", shown=first)
    assert (status, second != first) == (200, True)
    assert "5 of 40 steps" in page
    RolloutLog(folder, groups_per_step=1).write(5, [response(9, 1.0)])
    status, page, _ = get(server, "/", shown=second)
    assert (status, '"group_id":9' in page) == (200, True)


def test_another_status_is_another_page(folder):
    said = ["running", "<b>finished</b>"]
    report = LiveReport([folder], status=lambda: said[0])
    first, _ = report.page()
    said.pop(0)
    second, page = report.page(first)
    assert second != first
    assert "&lt;b&gt;finished&lt;/b&gt;</p>" in page


def test_a_line_that_takes_long_is_not_asked_for_at_every_request(folder, monkeypatch):
    now, asked = [0.0], []

    def status():
        asked.append(now[0])
        now[0] += 1.0
        return "running"

    monkeypatch.setattr(watch, "PAUSE_PER_LOOK", PAUSE)
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    page = LiveReport([folder], status=status)
    for _ in range(20):
        now[0] += 1.0
        page.page()
    assert asked == [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]


def test_drawing_takes_a_fifth_of_the_time_at_most(folder, monkeypatch):
    now = [0.0]
    drawn = []

    def content(runs, **options):
        drawn.append(now[0])
        now[0] += 3.0
        return report.content(runs, **options)

    monkeypatch.setattr(watch, "PAUSE_PER_LOOK", PAUSE)
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "content", content)
    page = LiveReport([folder])
    for step in range(5, 25):
        add_step(folder, step)
        now[0] += 2.0
        page.page()
    assert drawn == [0.0, 15.0, 30.0, 45.0]


def test_a_folder_that_is_gone_is_said_and_may_come_back(server, folder, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    status, body, _ = get(server, "/")
    assert status == 503
    assert "no such run folder" in body
    (tmp_path / "elsewhere").rename(folder)
    assert get(server, "/")[0] == 200


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "localhost"])
def test_a_tunnel_may_have_another_port(server, host):
    assert get(server, "/", host=host)[0] == 200


def test_a_status_that_cannot_be_read_does_not_hold_up_the_page(folder, monkeypatch):
    def vanished(*_):
        raise FileNotFoundError(2, "No such file or directory", "driver.json")

    _, page = LiveReport([folder], status=vanished).page()
    assert "driver.json" in page
    assert "4 of 40 steps" in page
    monkeypatch.setattr("gtpo_megatron.cli.watch.read_status", vanished)
    assert status_line(folder, "run").startswith("run: ")


@pytest.mark.slow
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", ""])
def test_other_names_of_this_address_get_nothing(server, host):
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1].strip("/"))), timeout=10)
    connection.sendall(f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
    assert b" 403 " in connection.recv(100)
    connection.close()


def test_other_paths_are_not_found(server):
    for path in ("/../config.yaml", "/config.yaml", "/news"):
        assert get(server, path)[0] == 404


def test_a_port_that_is_taken_is_a_configuration_error(server, folder):
    port = int(server.url.rsplit(":", 1)[1].strip("/"))
    with pytest.raises(ConfigError, match=f"port={port} cannot be used"):
        ReportServer(LiveReport([folder]), port=port)


@pytest.mark.parametrize("port", ["-1", "65536", "99999"])
def test_a_number_that_is_no_port_is_one_line(folder, capsys, port):
    assert dispatch.run(["watch", str(folder), f"--port={port}"]) == 2
    error = capsys.readouterr().err
    assert f"port={port} is no port" in error
    assert error.count("\n") == 1


def test_the_line_names_runs_as_the_page_does(tmp_path, monkeypatch):
    folders = [make_run(tmp_path / parent / "run", num_steps=1) for parent in ("a", "b")]
    served = []

    def serve(server):
        served.append(server._server.RequestHandlerClass.args[0])
        server._server.server_close()

    monkeypatch.setattr(ReportServer, "serve", serve)

    def shown(*arguments):
        assert dispatch.run(["watch", *arguments, "--port", "0"]) == 0
        _, page = served[-1].page()
        status = re.search(r'<p id="live"[^>]*>(.*?)</p>', page)[1]
        data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
        return [line.partition(": ")[0] for line in status.split("   |   ")], data["runs"]

    names, runs = shown(*map(str, folders))
    assert names == [run["name"] for run in runs] == ["a/run", "b/run"]
    monkeypatch.chdir(folders[0])
    names, runs = shown(".")
    assert names == [run["name"] for run in runs] == ["run"]


def test_a_wrong_folder_is_an_error_before_anything_is_served(tmp_path):
    with pytest.raises(DataError, match="no such run folder"):
        LiveReport([tmp_path / "typo"])


def test_the_line_on_a_run_and_on_one_of_an_older_version(tmp_path, folder):
    (folder / "config.yaml").write_text(to_yaml(gtpo()))
    assert status_line(folder, "run").startswith("run: not started, step 4 of 40 (10%), 6s a step")
    (folder / "config.yaml").write_text("num_steps: 4\nan_old_field: 1\n")
    assert status_line(folder, "run").startswith("run: ")
    assert "an_old_field" in status_line(folder, "run")


def test_the_command_needs_a_run(capsys):
    assert dispatch.run(["watch"]) == 2
    assert "at least one run folder" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(folder):
    command = [
        sys.executable,
        "-c",
        "import sys; from gtpo_megatron.cli.dispatch import run; sys.exit(run(sys.argv[1:]))",
    ]
    process = subprocess.Popen([*command, "watch", str(folder), "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[0]
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert b"4 of 40 steps" in answer.read()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in rest


def browse(report, profile):
    """Leaves a page open for some of its own seconds; returns what the browser had then, and its messages."""
    server = ReportServer(report, port=0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             "--virtual-time-budget=15000", f"--user-data-dir={profile}", "--dump-dom", server.url],
            capture_output=True, text=True, timeout=150, check=True,
        )  # fmt: skip
    finally:
        server.close()
        thread.join()
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
def test_an_open_page_follows_the_run(folder, tmp_path):
    """The run goes on when the page asks for the second time, so what the browser leaves is of a later answer."""
    asked = []

    def status():
        asked.append(1)
        if len(asked) == 2:
            add_step(folder, 5)
        return f"asked {len(asked)} times"

    page, console = browse(LiveReport([folder], status=status), tmp_path / "profile")
    assert console == []
    assert len(asked) > 2
    assert "5 of 40 steps" in page
    assert re.search(r'<p id="live"[^>]*>asked \d+ times</p>', page)
    assert page.count('data-drawn="yes"') == 1 + page.count('id="plot-') - page.count('<details class="folded"')


CHOOSE = """report.isDrawn.then(() => {{
  const select = document.querySelector("#pick-group select");
  select.value = {place};
  select.dispatchEvent(new Event("change"));
}});"""
SCROLL = 'report.isDrawn.then(() => document.getElementById("group").scrollIntoView());'


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.parametrize(
    ("reader", "step"),
    [
        (CHOOSE.format(place=2), 3),  # which is the second of those that are left
        *(
            pytest.param(reader, step, marks=pytest.mark.nightly)
            for reader, step in (
                (CHOOSE.format(place=1), 1),  # step 2 is left out later: the nearest of the same run
                (SCROLL, 4),  # a reader who chose nothing, but has come to the texts
                ("", 5),  # the newest
            )
        ),
    ],
)
def test_the_group_being_read_stays_while_others_come_and_go(tmp_path, monkeypatch, reader, step):
    monkeypatch.setattr("gtpo_megatron.companions.report.sampled_groups.MAX_GROUPS", 4)
    asset = report._asset
    monkeypatch.setattr(report, "_asset", lambda name: (reader if name == "watch.js" else "") + asset(name))
    early, late = (make_run(tmp_path / name, num_steps=1, responses=False) for name in ("early", "late"))

    def add_group(run, number):
        group = 10 * (run == early) + number
        RolloutLog(run, groups_per_step=1).write(number, [response(group, 1.0), response(group, 0.0)])

    for number in range(1, 5):
        add_group(late, number)
    asked = []

    def status():
        asked.append(1)
        if len(asked) == 2:  # the first run has its first groups, the other leaves out step 2 for step 5
            add_group(early, 1)
            add_group(late, 5)
        return f"asked {len(asked)} times"

    page, console = browse(LiveReport([early, late], status=status), tmp_path / "profile")
    assert console == []
    assert len(asked) > 2
    assert len(re.findall("<option[^>]*>step [1345] ", page)) == 4
    assert '<option value="0">early' in page
    assert re.search(r'class="prompt">Compute (\d+)', page)[1] == str(step)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
def test_the_axis_and_what_was_unfolded_stay_while_the_run_goes_on(tmp_path, monkeypatch):
    reader = """report.isDrawn.then(() => {
      document.querySelector("input[name=axis][value=sampled]").click();
      document.getElementById("folded-clip").open = true;
      const search = document.querySelector("#search input");
      search.value = "compute 1";
      search.dispatchEvent(new Event("input", { bubbles: true }));
    });"""
    asset = report._asset
    monkeypatch.setattr(report, "_asset", lambda name: (reader if name == "watch.js" else "") + asset(name))
    run, asked = make_run(tmp_path / "run", num_steps=6), []

    def status():
        asked.append(1)
        if len(asked) == 2:
            add_step(run, 7)
        return f"asked {len(asked)} times"

    page, console = browse(LiveReport([run], status=status, dollars_per_gpu_hour=2.0), tmp_path / "profile")
    assert console == []
    assert len(asked) > 2
    assert "7 of 40 steps" in page
    assert "$8.00 = 8 GPUs x 0.50 h x $2.00 a GPU and hour" in page
    assert re.search(r'<details class="folded" id="folded-clip" open=""', page)
    titles = re.findall(r'<text class="xtitle"[^>]*>([^<]*)', page)
    assert set(titles) == {"sampled tokens", "position"}
    assert re.search(r'class="prompt">Compute (\d+)', page)[1] == "1"
    assert "1 responses in 1 of 2 groups" in page


def test_at_step_0_it_says_what_will_appear_and_when(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(gtpo()))
    state = run_state.record_start(folder)
    lock = run_state.acquire(folder)
    try:
        line = status_line(folder, "run")
        assert line.startswith("run: running, step 0 of 40; starting (")
        assert line.endswith("where evaluation.at_start asks for it, curves and responses after step 1")
        _, page = LiveReport([folder]).page()
        assert "the held-out sets are measured before training with 8 responses a problem" in page
        assert "begin with step 1; accuracy has its next point after step 20." in page
        evaluation = replace(gtpo().evaluation, at_start=False)
        (folder / "config.yaml").write_text(to_yaml(replace(gtpo(), evaluation=evaluation)))
        assert "accuracy before training is not measured" in LiveReport([folder]).page()[1]
        (folder / "config.yaml").write_text(to_yaml(gtpo()))
        sink = JsonlSink(folder / "metrics.jsonl")
        sink.write(0, {"eval/heldout_mean_at_k": 0.25})
        sink.close()
        assert status_line(folder, "run").endswith("measured before training; curves and responses appear after step 1")
        assert "its accuracy before training is above" in LiveReport([folder]).page()[1]
    finally:
        held_locks.let_go(lock)
    assert state.num_starts == 1


def test_a_run_with_a_step_says_only_what_was_not_measured(folder):
    page = LiveReport([folder]).page()[1]
    assert "begin with step 1" not in page
