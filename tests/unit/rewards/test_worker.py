import threading
from multiprocessing import Pipe

from gtpo_megatron.rewards.worker import serve
from tests.unit.rewards import reward_functions


def test_serve_answers_row_by_row_until_the_other_end_closes():
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs, reward_functions.obey))
    thread.start()
    replies = []
    for response in ("fine", "raise no"):
        ours.send((response, "answer"))
        replies.append(ours.recv())
    ours.close()
    thread.join(5)
    theirs.close()
    assert replies == [("ok", 1.0), ("error", "ValueError: no")]
    assert not thread.is_alive()
