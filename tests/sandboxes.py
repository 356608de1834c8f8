"""The mark of tests that run programs under bubblewrap."""

import pytest

from gtpo_megatron.errors import SandboxError
from gtpo_megatron.sandbox.bubblewrap import check_bubblewrap


def _reason() -> str:
    try:
        check_bubblewrap()
    except SandboxError as error:
        return str(error)
    return ""


needs_bubblewrap = pytest.mark.skipif(bool(_reason()), reason=_reason())
