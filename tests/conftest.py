"""Settings of every test process: quiet threads, because several test processes share few cores."""

from __future__ import annotations

from tokenmill.core.config import calm_threads

calm_threads()
