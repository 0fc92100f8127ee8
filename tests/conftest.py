"""What every test starts from."""

import torch
from hypothesis import settings

# The networks are tiny: threads would cost more than they save, and each worker of pytest-xdist has one core.
torch.set_num_threads(1)

# A first call may load or compile something: a slow example is no failure.
settings.register_profile("leanbayes", deadline=None)
settings.load_profile("leanbayes")
