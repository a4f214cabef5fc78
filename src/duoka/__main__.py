"""`python -m duoka` is the `duoka` command."""

import sys

from duoka.cli.main import main

sys.exit(main())
