"""`python -m logitless` is the console script `logitless`."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the working directory, which `-m` has put there: its modules are not ours

from logitless.cli.main import main

sys.exit(main())
