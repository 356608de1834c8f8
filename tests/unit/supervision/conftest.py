"""Processes that end with the test."""

import subprocess

import pytest


@pytest.fixture
def started():
    processes = []

    def start(*command, **options):
        processes.append(subprocess.Popen(command, text=True, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()
