import pytest

from gtpo_megatron.evaluation.response_file import ResponseFile


@pytest.fixture(autouse=True)
def _closed_files(monkeypatch):
    """Every response file that a test opens is closed after it."""
    opened, initialise = [], ResponseFile.__init__

    def remembering(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(ResponseFile, "__init__", remembering)
    yield
    for file in opened:
        file.close()
