"""How a response is judged."""

import math
from dataclasses import field

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.grading.judge import JudgeConfig
from gtpo_megatron.errors import ConfigError


@configuration
class RewardConfig:
    """The outcome reward.

    Attributes:
        function: ``module:function`` or ``FILE.py:function`` taking ``(response, answer)``, ``(request)`` or
            ``(completions, **columns)``; or a weighted sum such as ``0.9*mine:tests + 0.1*mine.py:format``.
        num_workers: grading processes; 0 grades in the caller's process, without a time limit.
        timeout_s: time a response may take before it is marked failed and its worker replaced; a batched call has the
            time of one response.
        memory_limit_mib: memory a response may take before it is marked failed; 0: no limit.
        rows_per_call: most responses that a batched function is given at once, or that an async function grades at the
            same time, per process.
        sandbox: where programs in responses are run: ``bubblewrap``, the URL of a SandboxFusion service, or ``unsafe``:
            as this user, without protection.
        packages: folder of packages that programs may import (``pip install --target FOLDER numpy ...``), read-only in
            the sandbox; "": numpy and sortedcontainers of this installation. A service has its own.
        judge: the model that ``gtpo_megatron.rewards.judge:judge`` and ``reward_model`` ask.
    """

    function: str = "gtpo_megatron.rewards.math_answer:math_answer"
    num_workers: NonNegativeInt = 2
    timeout_s: PositiveFloat = 10.0
    memory_limit_mib: NonNegativeInt = 4096
    rows_per_call: PositiveInt = 16
    sandbox: str = "bubblewrap"
    packages: str = ""
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    def __post_init__(self) -> None:
        weighted_names(self.function)
        if self.sandbox not in ("bubblewrap", "unsafe") and not self.sandbox.startswith(("http://", "https://")):
            raise ConfigError(f"sandbox={self.sandbox!r}: must be bubblewrap, http://HOST:PORT, or unsafe")


def weighted_names(text: str) -> list[tuple[float, str]]:
    """The weights and names of ``0.9*mine:tests + 0.1*mine:format``; a name alone has weight 1.

    Raises:
        ConfigError: a term is not ``module:function`` with at most one weight, or a name is there twice.
    """
    found: list[tuple[float, str]] = []
    for term in text.split("+"):
        weight, star, name = term.rpartition("*")
        module, colon, function = name.strip().partition(":")
        try:
            factor = float(weight) if star else 1.0
        except ValueError:
            factor = math.nan
        if not math.isfinite(factor):
            raise ConfigError(f"reward function={text!r}: {weight.strip()!r} is no weight; write 0.9*module:function")
        if not (colon and module and function):
            raise ConfigError(
                f"reward function={text!r}: must be written module:function or FILE.py:function (a path has no +)"
            )
        found.append((factor, name.strip()))
    functions = [name.partition(":")[2] for _, name in found]
    if len(set(functions)) != len(functions):
        raise ConfigError(f"reward function={text!r}: two functions have one name, which their parts go by")
    return found
