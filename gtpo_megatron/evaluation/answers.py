"""The final answers of responses, for maj@k; a user's function may find them, so it is not trusted."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

FinalAnswer = Callable[[str], object]
"""Returns text or None; a user's own may return anything, and is checked."""


@dataclass(slots=True)
class AnswerFinder:
    """Finds the answer of a response, and says once where the function breaks: the response is worth keeping.

    Attributes:
        final_answer: of the reward function's module.
    """

    final_answer: FinalAnswer
    _has_warned: bool = field(default=False, init=False)

    def __call__(self, text: str) -> str | None:
        """The answer; None where there is none, and where the function breaks, since only a vote is lost."""
        found: object = None
        try:
            found = self.final_answer(text)
            mistake = "" if found is None or isinstance(found, str) else f"returned {found!r}"
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises, the response is worth keeping
            mistake = f"raised {error!r}"
        if mistake and not self._has_warned:
            self._has_warned = True
            logger.warning("final_answer %s, expected text or None; such responses have no vote in maj@k", mistake)
        return found if isinstance(found, str) else None
