"""One thread a process: two cores are soon full, and forked gloo ranks share them."""

import torch

torch.set_num_threads(1)
