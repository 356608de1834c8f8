"""Programs that try to get out, to harm the machine, or to reach the next program; the sandbox serves on after each."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gtpo_megatron.errors import SandboxError
from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox
from gtpo_megatron.sandbox.protocol import Case, Job, Limits
from gtpo_megatron.supervision.process_tree import descendants
from tests.sandboxes import needs_bubblewrap

pytestmark = needs_bubblewrap

SECRET = "hf_secret_of_this_test"


@pytest.fixture(scope="module")
def sandbox():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        made = BubblewrapSandbox()
        yield made
        made.close()


@pytest.fixture(autouse=True)
def serves_on(sandbox):
    """After each program the next one is right, in an empty folder, without a process left of the last one."""
    yield
    [after] = run(sandbox, "import os; print(input(), os.listdir('/tmp'), os.getpid())", stdin="next\n")
    assert (after.status, after.output) == ("ok", "next [] 2\n")
    assert len(processes(sandbox)) <= 2  # bubblewrap's own, and the server


def processes(sandbox):
    server = sandbox._servers.get(False)
    return descendants(server._process.pid) if server is not None and server._process is not None else []


def run(sandbox, source, *, stdin="", language="python", **limits):
    settings = {"case_s": 30.0, "total_s": 60.0} | limits  # for a loaded machine
    job = Job(source=source, language=language, cases=(Case(stdin=stdin),), limits=Limits(**settings))
    return sandbox.run(job).results


def attempts(sandbox, *lines):
    """Tries each statement; what came of it, by line."""
    tries = "".join(
        f"try:\n    {line}\n    print('done')\nexcept OSError as e:\n    print(e.errno)\n" for line in lines
    )
    [result] = run(sandbox, f"import os, ctypes, signal, sys\n{tries}")
    assert result.status == "ok", result
    return result.output.split()


def test_the_network_is_out_of_reach(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [found] = run(
            sandbox,
            "import socket\n"
            "for kind in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):\n"
            "    try: socket.socket(kind); print('socket')\n"
            "    except OSError as e: print(e.errno)\n"
            f"try: socket.create_connection(('127.0.0.1', {port}), 2); print('connected')\n"
            "except OSError as e: print(e.errno)",
        )
    assert found.output.split() == ["1"] * 5


def test_the_network_namespace_is_empty_even_without_the_filter(sandbox):
    """A compiler may open sockets neither; the namespace itself has no interface that is up."""
    server = processes(sandbox)[-1]
    assert Path(f"/proc/{server}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    assert Path(f"/proc/{server}/net/dev").read_text().count(":") == 1  # lo, which is down


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["user", "mnt", "pid", "net", "ipc", "uts"])
def test_every_namespace_is_its_own(sandbox, kind):
    run(sandbox, "")
    server = processes(sandbox)[-1]
    assert Path(f"/proc/{server}/ns/{kind}").readlink() != Path(f"/proc/self/ns/{kind}").readlink()


def test_home_environment_and_other_files_are_not_there(sandbox, tmp_path):
    (tmp_path / "token").write_text(SECRET)
    [found] = run(
        sandbox,
        "import os\n"
        "print(dict(os.environ))\n"
        f"for path in ('/root', '/home', {str(Path.home())!r}, {str(tmp_path / 'token')!r},\n"
        "             '/etc/passwd', '/proc/1/environ', '/proc/self/environ', '/sys/kernel',\n"
        "             '/var', '/run', '/dev/shm', '/dev/kmsg', '/dev/mem'):\n"
        "    print(path, os.path.exists(path))",
    )
    assert found.status == "ok", found
    assert SECRET not in found.output
    assert "True" not in found.output
    assert "HF_TOKEN" not in found.output


def test_of_etc_there_is_what_finds_libraries(sandbox):
    """docs/security.md names both; neither has a secret."""
    [found] = run(sandbox, "import os; print(*os.listdir('/etc'))")
    assert set(found.output.split()) <= {"ld.so.cache", "alternatives"}


def test_nothing_outside_can_be_written(sandbox):
    targets = ("/usr/bin/x", "/x", "/etc/x", "/dev/x", "/bin/sh", "/usr/lib/python3/x")
    found = attempts(sandbox, *(f"open({path!r}, 'w')" for path in targets))
    assert set(found) <= {"30", "13"}, found  # a read-only file system, or no permission
    assert len(found) == len(targets)


def test_a_symlink_leads_nowhere_else(sandbox, tmp_path):
    (tmp_path / "outside").write_text("outside")
    found = attempts(
        sandbox,
        f"os.symlink({str(tmp_path)!r}, 'link')",
        "open('link/outside').read()",
        "open('link/new', 'w')",
        "os.symlink('/usr', 'usr'); open('usr/new', 'w')",
        "os.makedirs('deep/er'); os.symlink('..', 'deep/er/up'); os.chmod('deep', 0)",
    )
    assert found == ["done", "2", "2", "30", "done"]
    assert (tmp_path / "outside").read_text() == "outside"
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]


def test_parents_and_other_processes_cannot_be_killed_or_traced(sandbox):
    found = attempts(
        sandbox,
        "os.kill(1, signal.SIGKILL); os.kill(1, 0)",  # process 1 of a namespace is immune to signals from inside
        f"os.kill({os.getpid()}, signal.SIGKILL)",
        "os.kill(-1, signal.SIGTERM)",
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "    if libc.ptrace(16, 1, 0, 0): raise OSError(ctypes.get_errno(), 'ptrace')",
        "buffer = ctypes.create_string_buffer(8)\n"
        "    if libc.process_vm_readv(1, buffer, 1, buffer, 1, 0) < 0: raise OSError(ctypes.get_errno(), 'read')",
        "os.pidfd_open(1)",
        "os.setpriority(os.PRIO_PROCESS, 1, -20)",
    )
    assert found[0] == "done"  # it lives on, and was not harmed
    assert found[1] == "3"  # there is no such process
    assert found[3:6] == ["1", "1", "1"]
    assert found[6] in ("1", "13")


def test_no_new_privileges_namespaces_mounts_or_capabilities(sandbox):
    found = attempts(
        sandbox,
        "libc = ctypes.CDLL(None, use_errno=True)",
        "if libc.unshare(0x10000000): raise OSError(ctypes.get_errno(), 'unshare')",
        "if libc.mount(b'tmpfs', b'/usr', b'tmpfs', 0, 0): raise OSError(ctypes.get_errno(), 'mount')",
        "if libc.mount(b'proc', b'/tmp', b'proc', 0, 0): raise OSError(ctypes.get_errno(), 'mount')",
        "os.chroot('/tmp')",
        "os.setuid(0)",
        "os.mknod('/tmp/sda', 0o60600, os.makedev(8, 0))",
        "if libc.sethostname(b'x', 1): raise OSError(ctypes.get_errno(), 'name')",
    )
    assert found[0] == "done"
    assert set(found[1:8]) <= {"1", "22"}, found
    assert "done" not in found[1:8]


def test_rlimits_cannot_be_raised(sandbox):
    [found] = run(
        sandbox,
        "import resource as r\n"
        "for kind in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_NPROC, r.RLIMIT_NOFILE):\n"
        "    try: r.setrlimit(kind, (r.RLIM_INFINITY, r.RLIM_INFINITY)); print('raised')\n"
        "    except (ValueError, OSError): print('no')",
    )
    assert found.output.split() == ["no"] * 5


def test_a_fork_bomb_does_not_fork(sandbox):
    [found] = run(sandbox, "import os\nwhile True: os.fork()")
    assert found.status == "error"
    assert "Operation not permitted" in found.detail


@pytest.mark.slow
def test_a_fork_bomb_in_cpp_does_not_fork(sandbox):
    source = "#include <unistd.h>\n#include <iostream>\nint main() { std::cout << fork() << vfork(); }"
    [found] = run(sandbox, source, language="cpp", compile_s=60.0)
    assert (found.status, found.output) == ("ok", "-1-1")


def test_threads_without_end_end(sandbox):
    [found] = run(
        sandbox,
        "import threading, time\n"
        "threading.stack_size(65536)\n"
        "n = 0\n"
        "try:\n"
        "    while True:\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "        n += 1\n"
        "except RuntimeError: print(n)",
    )
    assert found.status == "ok", found
    assert int(found.output) < 100


@pytest.mark.parametrize(
    "source",
    ["x = bytearray(1 << 34)", "x = []\nwhile True: x.append(bytearray(1 << 20))", "x = 'a' * (1 << 36)"],
)
def test_a_memory_bomb_gets_a_memory_error(sandbox, source):
    [found] = run(sandbox, source, memory_mib=256)
    assert found.status == "error"
    assert "MemoryError" in found.detail


def test_ten_gigabytes_of_output_are_cut_at_a_megabyte(sandbox):
    [found] = run(sandbox, "import sys\nline = 'x' * (1 << 20)\nfor _ in range(10_000): sys.stdout.write(line)")
    assert found.status == "output"
    assert len(found.output) <= 1 << 20


def test_a_file_of_ten_gigabytes_is_refused_and_removed(sandbox):
    [found] = run(
        sandbox,
        "import os\n"
        "try:\n"
        "    with open('big', 'wb') as file:\n"
        "        for _ in range(10_000): file.write(b'x' * (1 << 20))\n"
        "except OSError as e: print(e.errno, os.path.getsize('big') >> 20)\n"
        "try:\n"
        "    for n in range(100):\n"
        "        with open(f'f{n}', 'wb') as file: file.write(b'x' * (1 << 20))\n"
        "except OSError as e: print(e.errno, n)\n"
        "try:\n"
        "    for n in range(100_000): open(f'empty{n}', 'w').close()\n"
        "except OSError as e: print(e.errno, n < 5000)",
    )
    first, second, third = (line.split() for line in found.output.splitlines())
    assert first[0] in ("27", "28")  # too large, or no space
    assert int(first[1]) <= 64
    assert second[0] == "28"
    assert third == ["28", "True"]


def test_no_process_outlives_its_program(sandbox):
    """Threads that ignore every signal and never end."""
    [found] = run(
        sandbox,
        "import signal, threading, time, os\n"
        "for n in range(1, 65):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "print('started', flush=True)",
        case_s=3.0,
    )
    assert (found.status, found.output) == ("timeout", "started\n")
    assert len(processes(sandbox)) <= 2


def test_a_signal_storm_harms_the_program_alone(sandbox):
    [found] = run(
        sandbox,
        "import os, signal\n"
        "for _ in range(20_000):\n"
        "    for target in (1, -1, 0):\n"
        "        for n in (signal.SIGURG, signal.SIGCONT, signal.SIGWINCH):\n"
        "            try: os.kill(target, n)\n"
        "            except OSError: pass\n"
        "print('over')",
    )
    assert (found.status, found.output) == ("ok", "over\n")


@pytest.mark.parametrize(
    "line",
    [
        "for n in range(1, 65): os.kill(1, n)",
        "for k in range(16): resource.prlimit(1, k, (0, 0))",
        "r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, 1); fcntl.fcntl(r, 10, 9); fcntl.fcntl(r, fcntl.F_SETFL, "
        "os.O_ASYNC); os.write(w, b'x')",
        "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    ],
)
def test_what_watches_a_program_cannot_be_ended_so_that_it_has_no_verdict(sandbox, line):
    source = (
        f"import os, resource, fcntl, time\ndef end():\n    {line}\n"
        "try: end()\nexcept OSError: pass\ntime.sleep(0.1)\nprint(input())\nraise SystemExit(3)"
    )
    [found] = run(sandbox, source, stdin="1\n")
    assert (found.status, found.output) == ("error", "1\n")


def test_a_program_that_hangs_costs_its_limit_once(sandbox):
    job = Job(source="while True: pass", language="python", cases=(Case(stdin=""),) * 20, limits=Limits(case_s=1.0))
    start = time.monotonic()
    found = sandbox.run(job).results
    assert time.monotonic() - start < 15.0, "one limit, not twenty"
    assert [one.status for one in found] == ["timeout"] + ["not run"] * 19


def test_a_report_that_a_program_writes_itself_is_not_believed(sandbox):
    source = (
        "import os\n"
        'for _ in range(3): os.write(3, b\'{"nonce": "", "status": "ok", "output": "", "detail": ""}\\n\')\n'
        "os.write(3, b'{\"results\": []}\\n[[[[\\n\\xff\\n')\n"
        "os._exit(0)"
    )
    found = sandbox.run(Job(source=source, language="python", cases=(Case(code="assert False"),) * 2)).results
    assert [one.status for one in found] == ["error", "error"]


def test_the_server_ends_with_its_owner(tmp_path):
    script = (
        "import os, time\n"
        "from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox\n"
        "from gtpo_megatron.sandbox.protocol import Case, Job\n"
        "s = BubblewrapSandbox()\n"
        "s.run(Job(source='', language='python', cases=(Case(stdin=''),)))\n"
        "print(s._servers[False]._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    end = time.monotonic() + 10
    while time.monotonic() < end and Path(f"/proc/{int(done.stdout)}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_a_server_that_is_killed_is_replaced(sandbox):
    run(sandbox, "")
    server = processes(sandbox)[-1]
    killer = threading.Timer(0.5, os.kill, (server, 9))
    killer.start()
    with pytest.raises(SandboxError, match="gave no answer"):
        run(sandbox, "import time; time.sleep(3)")
    assert run(sandbox, "print(1)")[0].output == "1\n"
