import threading
from multiprocessing import Pipe

from gtpo_megatron.rewards.function import resolve_rewards
from gtpo_megatron.rewards.grade import Reply, RewardCaller
from gtpo_megatron.rewards.processes.worker import serve
from gtpo_megatron.rewards.request import RewardRequest


def test_serve_answers_row_by_row_until_the_other_end_closes():
    ours, theirs = Pipe()
    caller = RewardCaller(resolve_rewards("tests.unit.rewards.reward_functions:obey"), timeout_s=5.0)
    thread = threading.Thread(target=serve, args=(theirs, caller))
    thread.start()
    replies = []
    for response in ("fine", "raise no"):
        ours.send([RewardRequest(response=response)])
        replies.append(ours.recv())
    ours.close()
    thread.join(5)
    theirs.close()
    assert replies == [[Reply("ok", 1.0, {})], [Reply("error", reason="ValueError: no")]]
    assert not thread.is_alive()
