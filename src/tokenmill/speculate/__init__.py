"""Guessing the next tokens. Each drafter has one file and implements the HostDrafter or the DeviceDrafter protocol."""
