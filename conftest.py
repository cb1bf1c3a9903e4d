"""Set what has to be set before a test imports torch."""

import os

# threads that wait for work sleep: beside another job, spinning would cost most of the time
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
