"""Guessing the next tokens: each drafter in one file, attached through the HostDrafter or the DeviceDrafter seam."""
