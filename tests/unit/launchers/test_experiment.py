"""nemo-run is imported without what it does not need, and told what to submit, in which order."""

import gc
import io
import os
import subprocess
import sys

import pytest

from gtpo_megatron.errors import WorkerError
from launchers.experiment import _memory, submit
from launchers.job_folder import job_folder, write_job_folder
from tests.unit.launchers.job_run import write_program
from tests.unit.launchers.jobs import with_options

SCRIPT = """
import gc, importlib.util, sys
from launchers.experiment import _quick_imports
assert "torch" not in sys.modules, "the launcher itself needs none"
with _quick_imports():
    assert not gc.isenabled()
    try:
        import torch
    except ModuleNotFoundError:
        print("no torch here")
assert gc.isenabled()
print("torch again" if importlib.util.find_spec("torch") else "none at all")
"""


def test_torch_is_out_of_the_way_while_nemo_run_is_imported():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["no torch here", "torch again"], done.stderr


def test_a_torch_that_is_there_already_stays():
    import torch

    from launchers.experiment import _quick_imports

    with _quick_imports():
        assert sys.modules["torch"] is torch
    assert sys.modules["torch"] is torch


SBATCH = """\
#!/bin/bash
# the first takes longest, so that with several at a time another would be in the queue before it
place=$(sed -n 's/^CHAIN_PLACE=//p' "${@: -1}")
((place > 1)) || sleep 1
[[ $place != "$REFUSED" ]] || { echo "sbatch: error: one too many" >&2; exit 1; }
echo "$place" >> "$QUEUE"
echo "$((100 + $(wc -l < "$QUEUE")))$CLUSTER"
"""


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Submits a chain to a Slurm that is not there; ``queue`` is what it has."""
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "sbatch", SBATCH)
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nemo-run passes it on

    def submit_chain(num_jobs, *, refused="", cluster=""):
        variables = {"REFUSED": refused, "CLUSTER": cluster, "QUEUE": tmp_path / "queue"}
        for name, value in {**variables, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}.items():
            monkeypatch.setenv(name, str(value))
        options = with_options(run_dir=str(tmp_path / "run"), chain=num_jobs)
        job = job_folder(options, submission="s")
        write_job_folder(job, options, layout="", memory="")
        return submit(job, options)

    submit_chain.queue = lambda: (tmp_path / "queue").read_text(encoding="utf-8").split()
    yield submit_chain
    gc.collect()  # invoke, by which nemo-run calls sbatch, leaves pipes open in cycles: else a later test is blamed


pytestmark = [
    pytest.mark.timeout(240),  # nemo-run is imported
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # see chain
]


@pytest.mark.slow
def test_the_jobs_of_a_chain_are_in_the_queue_in_their_order(chain):
    """Slurm starts those that wait for each other in the order of their submission."""
    assert chain(11) == tuple(str(101 + index) for index in range(11))
    assert chain.queue() == [str(place) for place in range(1, 12)]


def test_a_chain_that_is_refused_in_part_says_what_is_in_the_queue(chain):
    with pytest.raises(WorkerError, match="one too many; it has taken 101, 102: scancel 101 102"):
        chain(3, refused="3")


def test_a_job_of_a_named_cluster_is_known_by_its_number(chain):
    """As scontrol takes it, with SLURM_CLUSTERS still set."""
    assert chain(1, cluster=";one") == ("101",)


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, "0"),
        ({"mem": "900G"}, "900G"),
        ({"exclusive": False}, None),
        ({"exclusive": False, "mem": "90G"}, "90G"),
        ({"sbatch": ("Mem_per_gpu=100G",)}, None),
    ],
)
def test_an_exclusive_node_is_asked_for_with_all_its_memory(fields, asked):
    """Slurm gives such a job the memory that it asks for, not the node's."""
    assert _memory(with_options(**fields)) == asked
