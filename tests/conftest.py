"""Settings of every test process: quiet threads, because several test processes share few cores; and Triton's
interpreter where there is no GPU (it must be chosen before anything imports triton)."""

from __future__ import annotations

import os
import pathlib

from tokenmill.core.config import calm_threads

calm_threads()
if not pathlib.Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
