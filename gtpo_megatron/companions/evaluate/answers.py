"""Extracts the final answers of responses for maj@k, with a function that may be the user's and may fail."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

FinalAnswer = Callable[[str], object]
"""Returns text or None; the result of a user's function is checked."""


@dataclass(slots=True)
class AnswerFinder:
    """Finds the answer of a response, and warns once if the function fails.

    Attributes:
        final_answer: the function, from the reward function's module.
    """

    final_answer: FinalAnswer
    _has_warned: bool = field(default=False, init=False)

    def __call__(self, text: str) -> str | None:
        """The answer; None if there is none or the function fails: the response then has no vote."""
        found: object = None
        try:
            found = self.final_answer(text)
            mistake = "" if found is None or isinstance(found, str) else f"returned {found!r}"
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything; only the vote is lost
            mistake = f"raised {error!r}"
        if mistake and not self._has_warned:
            self._has_warned = True
            logger.warning("final_answer %s, expected text or None; such responses have no vote in maj@k", mistake)
        return found if isinstance(found, str) else None
