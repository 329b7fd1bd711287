"""`python -m offbeat`."""

import sys

from offbeat.cli import main

sys.exit(main())
