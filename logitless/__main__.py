"""`python -m logitless` is the console script `logitless`."""

import sys

from logitless.cli.main import main

sys.exit(main())
