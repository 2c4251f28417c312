"""What a model's text means: reasoning, answer and tool calls, read by one description per format.

`describe.py` holds the small language of descriptions, `families.py` the descriptions, `parser.py` the one incremental
parser, `detect.py` the choice by chat template. Must not know: torch, HTTP, engines.
"""
