"""The web page and what it reads."""
