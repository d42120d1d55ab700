"""`python -m nanovllm` is the `nanovllm` command."""

import sys

from nanovllm.cli import main

sys.exit(main())
