import pytest

from gtpo_megatron.companions.evaluate.verdict_file import VerdictFile


@pytest.fixture(autouse=True)
def _closed_files(monkeypatch):
    """Every verdict file that a test opens is closed after it."""
    opened, initialise = [], VerdictFile.__init__

    def remembering(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(VerdictFile, "__init__", remembering)
    yield
    for file in opened:
        file.close()
