"""`python -m qerl_jax` is the command `qerl`."""

import sys

from qerl_jax.cli.main import main

sys.exit(main())
