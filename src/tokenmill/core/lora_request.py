"""The adapter of a request, under vLLM's names. Owns: its fields.

Must not know: files, devices.
"""

from __future__ import annotations

import msgspec

from tokenmill.core.spelled import Spelled


class LoRARequest(msgspec.Struct, metaclass=Spelled):
    """An adapter's name, vLLM's number for it, and its path (a PEFT folder or a GGUF file). Only the name identifies
    it."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    @property
    def name(self) -> str:
        """The same as lora_name."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The same as lora_int_id."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """The same as lora_path."""
        return self.lora_path
