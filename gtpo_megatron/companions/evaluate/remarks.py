"""What the figures of an evaluation do not tell: which responses count as wrong without having been graded."""

from collections import Counter
from collections.abc import Sequence

from gtpo_megatron.batch import ENDED_UNGRADED, REQUESTS_REFUSED
from gtpo_megatron.companions.evaluate.verdict_file import GradedResponse
from gtpo_megatron.data.solved_rates import VERDICTS_FILE
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import parse_json


def remarks(responses: Sequence[GradedResponse]) -> list[str]:
    """A sentence for each kind of response whose figure is nobody's verdict; none if there is none.

    Args:
        responses: responses that the command wanted, as far as they are there.

    Raises:
        DataError: what the file says of a refused request is damaged.
    """
    found = []
    failures = Counter(one.failure for one in responses if one.failure is not None)
    if failures:
        reason, count = failures.most_common(1)[0]
        found.append(
            f"{failures.total()} of {len(responses)} responses have no verdict and count as wrong; {count} x {reason}"
        )
    ungraded = sum(one.failure is None and bool(one.parts.get(ENDED_UNGRADED)) for one in responses)
    if ungraded:
        found.append(
            f"{ungraded} of {len(responses)} episodes were ended by a limit before they were graded, and have reward 0"
        )
    refused = [one for one in responses if one.parts.get(REQUESTS_REFUSED)]
    if refused:
        num = sum(int(one.parts[REQUESTS_REFUSED]) for one in refused)
        found.append(
            f"{num} requests of agents were refused, in {len(refused)} of {len(responses)} episodes; the first: "
            f"{_refusal(refused[0])}"
        )
    return found


def _refusal(response: GradedResponse) -> str:
    """Why a request was refused: of an episode that failed of it, the failure says so."""
    where = f"{VERDICTS_FILE}: info of {response.problem_id}"
    return Fields(parse_json(response.info or "{}", where), where).get("refused", str, response.failure or "not known")
