"""`python -m server.cli` is the console script `logitless`."""

import sys

from server.cli.main import main

sys.exit(main())
