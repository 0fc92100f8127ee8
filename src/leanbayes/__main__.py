"""`python -m leanbayes` is the command line, as torchrun and accelerate launch want it."""

import sys

from leanbayes.cli import main

sys.exit(main())
