"""Settings of every test process: quiet threads, because several test processes share few cores; and Triton's
interpreter where there is no GPU (it must be chosen before anything imports triton). And a profile of Hypothesis whose
cases are the same each time: `make test` judges a change, not luck; plain `pytest` goes on looking for new cases."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile

from tokenmill.core.config import calm_threads

calm_threads()
# A person's stored models are no part of a test.
os.environ["TOKENMILL_HOME"] = str(pathlib.Path(tempfile.gettempdir()) / f"tokenmill-tests-{os.getpid()}")
if not pathlib.Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
with contextlib.suppress(ImportError):  # a machine that only runs tests/gpu may lack it
    from hypothesis import settings

    settings.register_profile("settled", derandomize=True, database=None)
