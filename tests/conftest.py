"""What every test starts from."""

import torch

# The networks are tiny: threads would cost more than they save, and each worker of pytest-xdist has one core.
torch.set_num_threads(1)
