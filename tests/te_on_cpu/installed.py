"""The process that imports this is prepared: what ranks are forked of, once for all of them."""

import warnings

from tests.te_on_cpu import gpu_actor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    gpu_actor.install()
