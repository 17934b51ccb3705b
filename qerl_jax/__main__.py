"""Runs the command `qerl` for `python -m qerl_jax`."""

import sys

from qerl_jax.cli.main import main

sys.exit(main())
