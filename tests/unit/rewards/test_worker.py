import io
import threading
from multiprocessing import Pipe

from gtpo_megatron.rewards.worker import CappedOutput, serve
from tests.unit.rewards import reward_functions


def test_serve_answers_row_by_row_until_the_other_end_closes():
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs, reward_functions.obey), kwargs={"timeout_s": None})
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


def test_output_past_the_limit_of_a_row_is_left_out():
    stream = io.StringIO()
    output = CappedOutput(stream, limit=5)
    print("abc", end="", file=output)
    print("defgh", end="", file=output)
    print("more", file=output)
    assert stream.getvalue() == "abcde\n[the reward function printed more than 5 characters: cut]\n"
    output.begin_row()
    print("next", end="", file=output)
    assert stream.getvalue().endswith("cut]\nnext")
    assert output.isatty() is False
