"""``python -m skippy_sched`` is the skippy-sched command."""

import sys

from skippy_sched.cli import main

sys.exit(main())
