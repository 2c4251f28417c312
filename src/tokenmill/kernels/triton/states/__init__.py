"""What rows carry from step to step: recurrent states and their scans, and how rows move on."""
